// What instrumented code calls: before every access (AddressSanitizer's names), and after a failed check of an index, an
// alignment or an operand (UndefinedBehaviorSanitizer's names, with the source line in their first argument).
#include <string.h>

#include "../shim/metal_runtime.h"
#include "checks.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_FINDINGS 64

void metal_stop(const char* text);

static uint32_t this_thread(void) { return metal_current_thread()->thread_index_in_threadgroup; }

static Finding findings[MAX_FINDINGS];
static int finding_count, is_running;

EXPORT void checks_begin(const void* kernel, Region* buffers, int count) {
  regions_begin(kernel, buffers, count);
  shadow_begin();
  finding_count = 0;
}

// Ends the checks; the number of findings and of regions goes to `counts`.
EXPORT void checks_end(int* counts) {
  is_running = 0;
  shadow_end();
  counts[0] = finding_count;
  counts[1] = region_count;
}

EXPORT const Finding* checks_findings(void) { return findings; }
EXPORT const Region* checks_regions(void) { return regions; }

// Keeps one finding for each pair of places in the source.
void report(Finding finding) {
  for (int i = 0; i < finding_count; i++) {
    const Finding* known = &findings[i];
    if (known->problem == finding.problem && known->site == finding.site && known->other_site == finding.other_site &&
        known->region == finding.region && known->line == finding.line) {
      return;
    }
  }
  if (finding_count < MAX_FINDINGS) findings[finding_count++] = finding;
}

static void out_of_bounds(uintptr_t address, size_t size, int is_write, const void* site) {
  Region* region = nearest_region(address);
  Finding finding = {.problem = OUT_OF_BOUNDS, .region = region ? region - regions : -1, .size = size};
  finding.offset = region ? (int64_t)(address - region->start) : 0;
  finding.site = kernel_offset(site);
  finding.thread = this_thread();
  finding.is_write = is_write;
  report(finding);
  metal_stop("an access out of bounds");
}

static void access(const void* pointer, size_t size, int is_write, int is_atomic, const void* site) {
  uintptr_t address = (uintptr_t)pointer;
  if (!is_running || !size || is_private(address, size)) return;
  Region* region = find_region(address);
  if (region && address - region->start + size <= region->size) {
    shadow_access(region, address, size, is_write, is_atomic, site);
  } else if (is_write || region || !is_read_only(address)) {
    out_of_bounds(address, size, is_write, site);
  }
}

#define SITE __builtin_return_address(0)
#define FIXED(size)                                                                                     \
  EXPORT void __asan_load##size##_noabort(const void* address) { access(address, size, 0, 0, SITE); } \
  EXPORT void __asan_store##size##_noabort(const void* address) { access(address, size, 1, 0, SITE); }
FIXED(1)
FIXED(2)
FIXED(4)
FIXED(8)
FIXED(16)
EXPORT void __asan_loadN_noabort(const void* address, size_t size) { access(address, size, 0, 0, SITE); }
EXPORT void __asan_storeN_noabort(const void* address, size_t size) { access(address, size, 1, 0, SITE); }
EXPORT void __asan_handle_no_return(void) {}

EXPORT void* __asan_memcpy(void* to, const void* from, size_t size) {
  access(from, size, 0, 0, SITE);
  access(to, size, 1, 0, SITE);
  return memcpy(to, from, size);
}

EXPORT void* __asan_memmove(void* to, const void* from, size_t size) {
  access(from, size, 0, 0, SITE);
  access(to, size, 1, 0, SITE);
  return memmove(to, from, size);
}

EXPORT void* __asan_memset(void* to, int value, size_t size) {
  access(to, size, 1, 0, SITE);
  return memset(to, value, size);
}

static void on_atomic(const void* address, unsigned size, unsigned writes) { access(address, size, writes, 1, 0); }

// What the kernel's library does before its first threadgroup is not the kernel.
static void on_group_begins(unsigned group) {
  is_running = 1;
  shadow_group_begins(group);
}

EXPORT const MetalObserver checks_observer = {
    .group_begins = on_group_begins,
    .released = shadow_released,
    .atomic = on_atomic,
};

// The head of every UBSan check's static data.
typedef struct {
  const char* file;
  uint32_t line, column;
} Location;

static void undefined(Problem problem, const Location* location) {
  if (!is_running) return;
  report((Finding){.problem = problem, .line = location->line, .region = -1, .thread = this_thread()});
}

EXPORT void __ubsan_handle_out_of_bounds(const Location* data, uintptr_t index) {
  (void)index;
  undefined(BAD_INDEX, data);
  metal_stop("an index out of range");
}

EXPORT void __ubsan_handle_type_mismatch_v1(const Location* data, uintptr_t pointer) {
  (void)pointer;
  undefined(MISALIGNED, data);
  metal_stop("a misaligned access");
}

static void bad_shift(const void* site) {
  if (!is_running) return;
  report((Finding){.problem = BAD_SHIFT, .region = -1, .site = kernel_offset(site), .thread = this_thread()});
}

// Called before every shift by a variable; Metal leaves one by more than the type's bits undefined.
EXPORT void checks_shift_32(uint32_t count) { if (count > 31) bad_shift(SITE); }
EXPORT void checks_shift_64(uint64_t count) { if (count > 63) bad_shift(SITE); }

// Called before every access to a vector.
EXPORT void checks_alignment(uintptr_t address, uint32_t alignment) {
  if (!is_running || address % alignment == 0) return;
  report((Finding){.problem = MISALIGNED, .region = -1, .site = kernel_offset(SITE), .thread = this_thread()});
  metal_stop("a misaligned access");
}

#define OPERANDS(name, problem)                                                             \
  EXPORT void __ubsan_handle_##name(const Location* data, uintptr_t left, uintptr_t right) { \
    (void)left, (void)right;                                                                \
    undefined(problem, data);                                                               \
  }
OPERANDS(divrem_overflow, BAD_DIVISION)
OPERANDS(add_overflow, INTEGER_OVERFLOW)
OPERANDS(sub_overflow, INTEGER_OVERFLOW)
OPERANDS(mul_overflow, INTEGER_OVERFLOW)
OPERANDS(negate_overflow, INTEGER_OVERFLOW)
OPERANDS(float_cast_overflow, BAD_CONVERSION)
