// Whose memory is an address in? Buffers are told by the caller of the launch; threadgroup variables and constants
// register themselves when the kernel's library is loaded, because the sanitizer emits a constructor for that.
#define _GNU_SOURCE
#include <link.h>
#include <string.h>

#include "checks.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_REGIONS 256
#define MAX_GLOBALS 65536

void metal_stack(uintptr_t* low, uintptr_t* high);

Region regions[MAX_REGIONS];
int region_count;

// Layout of LLVM's AddressSanitizer for a global variable.
typedef struct {
  uintptr_t start, size, size_with_redzone;
  const char *name, *module;
  uintptr_t has_dynamic_init, location, odr_indicator;
} Global;

static const Global* globals[MAX_GLOBALS];
static int global_count;

typedef struct {
  uintptr_t base, low, high;
  struct { uintptr_t low, high; int is_writable; } segments[8];
  int segment_count;
} Image;

static Image kernel_image, runtime_image;

EXPORT void __asan_register_globals(const Global* first, uintptr_t count) {
  for (uintptr_t i = 0; i < count && global_count < MAX_GLOBALS; i++) globals[global_count++] = &first[i];
}

EXPORT void __asan_unregister_globals(const Global* first, uintptr_t count) {
  int kept = 0;
  for (int i = 0; i < global_count; i++) {
    if (globals[i] < first || globals[i] >= first + count) globals[kept++] = globals[i];
  }
  global_count = kept;
}

typedef struct { uintptr_t address; Image* image; } Search;

static int look_at_image(struct dl_phdr_info* info, size_t size, void* data) {
  (void)size;
  const Search* search = data;
  Image image = {.base = info->dlpi_addr, .low = UINTPTR_MAX};
  for (int i = 0; i < info->dlpi_phnum && image.segment_count < 8; i++) {
    const ElfW(Phdr)* header = &info->dlpi_phdr[i];
    if (header->p_type != PT_LOAD) continue;
    uintptr_t low = info->dlpi_addr + header->p_vaddr, high = low + header->p_memsz;
    image.segments[image.segment_count].low = low;
    image.segments[image.segment_count].high = high;
    image.segments[image.segment_count++].is_writable = (header->p_flags & PF_W) != 0;
    if (low < image.low) image.low = low;
    if (high > image.high) image.high = high;
  }
  if (search->address < image.low || search->address >= image.high) return 0;
  *search->image = image;
  return 1;
}

static void find_image(const void* address, Image* image) {
  Search search = {(uintptr_t)address, image};
  dl_iterate_phdr(look_at_image, &search);
}

static int is_in(const Image* image, uintptr_t address) { return address >= image->low && address < image->high; }

static int is_writable(const Image* image, uintptr_t address) {
  for (int i = 0; i < image->segment_count; i++) {
    if (address >= image->segments[i].low && address < image->segments[i].high) return image->segments[i].is_writable;
  }
  return 0;
}

void regions_begin(const void* kernel, Region* buffers, int count) {
  find_image(kernel, &kernel_image);
  find_image(&regions, &runtime_image);
  region_count = count;
  memcpy(regions, buffers, count * sizeof *buffers);
  for (int i = 0; i < global_count && region_count < MAX_REGIONS; i++) {
    const Global* global = globals[i];
    if (!is_in(&kernel_image, global->start)) continue;
    int kind = is_writable(&kernel_image, global->start) ? THREADGROUP : CONSTANT;
    Region region = {.name = global->name, .start = global->start, .size = global->size, .kind = kind};
    region.guard = global->size_with_redzone - global->size;
    regions[region_count++] = region;
  }
}

Region* find_region(uintptr_t address) {
  static int last;
  for (int i = 0; i < region_count; i++) {
    int index = (last + i) % region_count;
    if (address - regions[index].start >= regions[index].size) continue;
    last = index;
    return &regions[index];
  }
  return 0;
}

Region* nearest_region(uintptr_t address) {
  Region* nearest = 0;
  uintptr_t best = 1 << 20;  // further away, a name would be a guess
  for (int i = 0; i < region_count; i++) {
    Region* region = &regions[i];
    uintptr_t distance = address < region->start ? region->start - address : address - region->start - region->size;
    if (distance < best) {
      best = distance;
      nearest = region;
    }
  }
  return nearest;
}

int is_private(uintptr_t address, size_t size) {
  uintptr_t low, high;
  metal_stack(&low, &high);
  return (address >= low && address + size <= high) || is_in(&runtime_image, address);
}

int is_read_only(uintptr_t address) {
  for (int i = 0; i < region_count; i++) {
    if (address - regions[i].start - regions[i].size < regions[i].guard) return 0;
  }
  return is_in(&kernel_image, address) && !is_writable(&kernel_image, address);
}

uint64_t kernel_offset(const void* site) { return (uintptr_t)site - kernel_image.base; }
