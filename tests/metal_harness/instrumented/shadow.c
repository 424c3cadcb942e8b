// Remembers, for every byte, who touched it and when, and from that tells races, reads of what nobody wrote, and traffic.
//
// Two accesses of different threads are ordered only by a barrier between them that names their memory (mem_device,
// mem_threadgroup) and that both threads pass: a threadgroup_barrier, or a simdgroup_barrier within one simdgroup.
// Threads of different threadgroups are never ordered. A barrier raises a counter, so "is there a barrier between" is
// a comparison of the counters then and now.
#include <stdlib.h>

#include "../shim/metal_runtime.h"
#include "checks.h"

#define LANES 32
enum { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

// An access: by whom (group 0 is nobody), after how many barriers, from where.
typedef struct {
  uint32_t group, barriers, simd_barriers;
  uint16_t thread;
  uint16_t is_atomic;
  const void* site;
} Mark;

// Of a byte that can be written. Five marks are enough to find a conflicting access whenever there is one: any reader
// that a write conflicts with is `first` (another threadgroup), or is followed by `latest`, by the latest of another thread
// or by the latest of another simdgroup, which then conflict too.
typedef struct {
  Mark write;
  Mark first, latest, other_thread, other_simdgroup;  // readers
} Cell;

// Of a byte of an input: who read it last.
typedef struct {
  uint32_t group, thread;
} Stamp;

static uint32_t group;
static struct {
  uint32_t barriers;
  uint32_t simd_barriers[1024 / LANES];
} clocks[2];  // of device, of threadgroup memory

static int is_threadgroup(const Region* region) { return region->kind == THREADGROUP; }

void shadow_begin(void) {
  group = 0;
  for (int i = 0; i < region_count; i++) {
    size_t size = regions[i].kind == INPUT || regions[i].kind == CONSTANT ? sizeof(Stamp) : sizeof(Cell);
    regions[i].shadow = calloc(regions[i].size ? regions[i].size : 1, size);
  }
}

void shadow_end(void) {
  for (int i = 0; i < region_count; i++) {
    free(regions[i].shadow);
    regions[i].shadow = 0;
  }
}

void shadow_group_begins(unsigned number) {
  (void)number;
  group++;
}

void shadow_released(unsigned scope, unsigned which, unsigned flags) {
  for (int space = 0; space < 2; space++) {
    if (!(flags & (space ? MEM_THREADGROUP : MEM_DEVICE))) continue;
    uint32_t* clock = scope == 0 ? &clocks[space].barriers : &clocks[space].simd_barriers[which];
    ++*clock;
  }
}

static Mark mark_now(const Region* region, int is_atomic, const void* site) {
  uint32_t thread = metal_current_thread()->thread_index_in_threadgroup;
  int space = is_threadgroup(region);
  return (Mark){group, clocks[space].barriers, clocks[space].simd_barriers[thread / LANES], thread, is_atomic, site};
}

static int is_concurrent(const Mark* before, const Mark* now, const Region* region) {
  if (!before->group || (before->is_atomic && now->is_atomic)) return 0;
  if (before->group != now->group) return !is_threadgroup(region);  // threadgroup memory starts anew with each
  if (before->thread == now->thread || before->barriers != now->barriers) return 0;
  return before->thread / LANES != now->thread / LANES || before->simd_barriers == now->simd_barriers;
}

static void tell(Problem problem, Region* region, size_t offset, const Mark* now, int is_write, const Mark* before,
                 int before_is_write) {
  Finding finding = {.problem = problem, .region = region - regions, .offset = offset, .size = 1};
  finding.site = kernel_offset(now->site);
  finding.thread = now->thread;
  finding.group = now->group - 1;
  finding.is_write = is_write;
  if (before) {
    finding.other_site = kernel_offset(before->site);
    finding.other_thread = before->thread;
    finding.other_group = before->group - 1;
    finding.other_is_write = before_is_write;
  }
  report(finding);
}

static void remember_reader(Cell* cell, const Mark* now) {
  if (!cell->first.group) cell->first = *now;
  if (cell->latest.group != now->group) {
    cell->other_thread = cell->other_simdgroup = (Mark){0};
  } else if (cell->latest.thread != now->thread) {
    cell->other_thread = cell->latest;
    if (cell->latest.thread / LANES != now->thread / LANES) cell->other_simdgroup = cell->latest;
  }
  cell->latest = *now;
}

static void read_byte(Region* region, size_t offset, const Mark* now) {
  Cell* cell = (Cell*)region->shadow + offset;
  int is_fresh = !cell->write.group || (is_threadgroup(region) && cell->write.group != now->group);
  if (is_fresh && !region->initialized) tell(UNINITIALIZED, region, offset, now, 0, 0, 0);
  if (is_concurrent(&cell->write, now, region)) tell(RACE, region, offset, now, 0, &cell->write, 1);
  region->unique_read += !cell->first.group;
  region->group_read += cell->latest.group != now->group;
  remember_reader(cell, now);
}

static void write_byte(Region* region, size_t offset, const Mark* now) {
  Cell* cell = (Cell*)region->shadow + offset;
  const Mark* readers[] = {&cell->first, &cell->latest, &cell->other_thread, &cell->other_simdgroup};
  for (int i = 0; i < 4; i++) {
    if (is_concurrent(readers[i], now, region)) tell(RACE, region, offset, now, 1, readers[i], 0);
  }
  if (is_concurrent(&cell->write, now, region)) {
    tell(RACE, region, offset, now, 1, &cell->write, 1);
  } else if (region->kind == OUTPUT && cell->write.group && !now->is_atomic) {
    tell(WRITTEN_TWICE, region, offset, now, 1, &cell->write, 1);
  }
  region->unique_written += !cell->write.group;
  region->group_written += cell->write.group != now->group;
  cell->write = *now;
}

static void read_input_byte(Region* region, size_t offset, const Mark* now) {
  Stamp* stamp = (Stamp*)region->shadow + offset;
  region->unique_read += !stamp->group;
  region->group_read += stamp->group != now->group;
  region->reread += stamp->group == now->group && stamp->thread == now->thread;
  *stamp = (Stamp){now->group, now->thread};
}

void shadow_access(Region* region, uintptr_t address, size_t size, int is_write, int is_atomic, const void* site) {
  Mark now = mark_now(region, is_atomic, site);
  size_t start = address - region->start;
  if (is_write) region->written += size;
  else region->read += size;
  for (size_t offset = start; offset < start + size; offset++) {
    if (region->kind == INPUT || region->kind == CONSTANT) {
      if (is_write) return tell(WRITE_TO_INPUT, region, offset, &now, 1, 0, 0);
      read_input_byte(region, offset, &now);
    } else {
      if (!is_write) read_byte(region, offset, &now);
      else write_byte(region, offset, &now);
    }
  }
}
