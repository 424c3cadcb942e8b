// What a compiled kernel and the executor (runtime.c) say to one another. Read by both, so plain C.
#pragma once

// Attributes of one thread, and of its threadgroup, under their Metal names. Those with three axes take 16 bytes.
typedef struct {
  unsigned thread_position_in_grid[4];
  unsigned thread_position_in_threadgroup[4];
  unsigned thread_index_in_threadgroup;
  unsigned thread_index_in_simdgroup;
  unsigned simdgroup_index_in_threadgroup;
  unsigned padding;
} MetalThread;

typedef struct {
  unsigned grid_origin[4];
  unsigned threads_per_grid[4];
  unsigned threads_per_threadgroup[4];           // of this threadgroup: smaller at the edge of the grid
  unsigned dispatch_threads_per_threadgroup[4];  // as asked for
  unsigned threadgroup_position_in_grid[4];
  unsigned threadgroups_per_grid[4];
  unsigned simdgroups_per_threadgroup;
  unsigned dispatch_simdgroups_per_threadgroup;
  unsigned padding[2];
} MetalGroup;

// Values that the lanes of a simdgroup show one another in one operation. `lanes` has a bit for each lane that takes
// part; `values` holds 32 of them, one after another, each as large as the operation's type.
#define METAL_VALUE_SIZE 64
typedef struct {
  unsigned lanes;
  unsigned padding[15];
  unsigned char values[32 * METAL_VALUE_SIZE];
} MetalExchange;

#ifdef __OPENCL_CPP_VERSION__
extern "C" {
#endif

#ifndef __OPENCL_CPP_VERSION__
// Called while a kernel runs, each if it is not null. `scope` is 0 for a threadgroup, 1 for a simdgroup; `which` is the
// number of the simdgroup; `site` the line (<< 12) and column of the call in the kernel's source.
typedef struct {
  void (*group_begins)(unsigned group);
  void (*arrives)(unsigned thread, unsigned scope, unsigned flags, unsigned site);  // at a barrier
  void (*released)(unsigned scope, unsigned which, unsigned flags);  // all have arrived, each with the flags in common
  void (*exchanged)(unsigned simdgroup);                             // all lanes have reached a simdgroup operation
  void (*atomic)(const void* address, unsigned size, unsigned writes);
} MetalObserver;
#endif

// A call in the source is a call in the code, and runs where the source says: line and column are its `site`.
#ifdef __OPENCL_CPP_VERSION__
#define METAL_WAITS __attribute__((convergent, noduplicate))
#else
#define METAL_WAITS
#endif

const MetalThread* metal_current_thread(void);

// Shows `value` to the simdgroup and waits for its other lanes. `name` is the operation's, a `const char*`.
METAL_WAITS const MetalExchange* metal_exchange(__SIZE_TYPE__ name, unsigned site, const void* value, unsigned size);

// Waits for the whole threadgroup, or simdgroup. `flags` are Metal's mem_flags.
METAL_WAITS void metal_threadgroup_barrier(unsigned flags, unsigned site);
METAL_WAITS void metal_simdgroup_barrier(unsigned flags, unsigned site);

void metal_atomic_load(const void* address, void* value, unsigned size);
void metal_atomic_store(void* address, const void* value, unsigned size);

#ifdef __OPENCL_CPP_VERSION__
}
#endif
