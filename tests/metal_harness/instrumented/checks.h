// What an instrumented kernel's accesses are checked against, and what is reported. The structs are mirrored in checks.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { INPUT, OUTPUT, THREADGROUP, CONSTANT };  // kinds of regions

// A buffer of the dispatch, a threadgroup variable or a constant of the kernel. The counters are bytes.
typedef struct {
  const char* name;
  uint64_t start, size;
  uint32_t kind;
  uint32_t initialized;  // an output that holds values before the launch: reads are fine, and it may stay unwritten
  uint64_t read, unique_read, group_read, reread;
  uint64_t written, unique_written, group_written;
  uint64_t guard;  // bytes behind it that belong to nobody
  void* shadow;
} Region;

typedef enum {
  OUT_OF_BOUNDS,
  WRITE_TO_INPUT,
  RACE,
  UNINITIALIZED,
  WRITTEN_TWICE,
  BAD_INDEX,
  MISALIGNED,
  BAD_SHIFT,
  BAD_DIVISION,
  BAD_CONVERSION,
  INTEGER_OVERFLOW,
} Problem;

// `site` and `other_site` are addresses in the kernel's library, from its base; `line` is set where the compiler told it.
typedef struct {
  uint32_t problem, line;
  int64_t region;  // index, or -1
  int64_t offset;  // bytes from the region's start
  uint64_t size, site, other_site;
  uint32_t thread, group, other_thread, other_group;
  uint32_t is_write, other_is_write;
} Finding;

// regions.c
extern Region regions[];
extern int region_count;
void regions_begin(const void* kernel, Region* buffers, int count);
Region* find_region(uintptr_t address);
Region* nearest_region(uintptr_t address);
int is_private(uintptr_t address, size_t size);  // the running thread's own memory, or the executor's
int is_read_only(uintptr_t address);             // among the kernel's constants, and not behind one with a name
uint64_t kernel_offset(const void* site);

// shadow.c
void shadow_begin(void);
void shadow_end(void);
void shadow_group_begins(unsigned number);
void shadow_released(unsigned scope, unsigned which, unsigned flags);
void shadow_access(Region* region, uintptr_t address, size_t size, int is_write, int is_atomic, const void* site);

// callbacks.c
void report(Finding finding);
