// Runs a compiled kernel as a GPU would: every thread has its own stack and keeps its place in the code (a fiber), 32
// of them form a simdgroup, and they wait for one another at barriers and simdgroup operations. One threadgroup runs at
// a time, on the calling thread, so a run is deterministic: the order of lanes, simdgroups and threadgroups is a
// parameter.
#define _GNU_SOURCE
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "context_switch.h"
#include "shim/metal_runtime.h"

#define EXPORT __attribute__((visibility("default")))
#define LANES 32
#define MAX_THREADS 1024
#define THREADGROUP_MEMORY (32u << 10)
#define STACK_SIZE (128 << 10)
#define GUARD_SIZE (4 << 10)

// ---------------------------------------------------------------------------------------------------------------------
// State of the threadgroup that runs.

typedef void Entry(const MetalThread*, const MetalGroup*, const uint64_t* buffers);

enum { NOT_WAITING, AT_SIMD_OPERATION, AT_SIMD_BARRIER, AT_BARRIER };

typedef struct {
  void* stack_pointer;
  MetalThread thread;
  const char* name;  // of the operation it waits at
  unsigned site, flags;
  uintptr_t path;  // through the functions of the kernel to that operation
  unsigned char waits;
  unsigned char turn;  // which of the two exchanges its next operation uses
} Fiber;

typedef struct {
  uint32_t live, ready;       // a bit a lane: has not returned; can run on
  MetalExchange exchange[2];  // a fast lane may be one operation ahead of a slow one, never two
} Simdgroup;

typedef struct {
  Entry* entry;
  const uint64_t* buffers;
  uint32_t grid[3];         // threads
  uint32_t threadgroup[3];  // threads
  uint32_t order;           // 0 forward, 1 reverse, 2 threadgroups and simdgroups shuffled by `seed`
  uint32_t seed;
  uint64_t threadgroup_memory[2];  // address and size in bytes
  const MetalObserver* observer;   // may be null
} Launch;

static struct {
  char* stacks;
  unsigned stacks_made;
  Fiber fibers[MAX_THREADS];
  Simdgroup simdgroups[MAX_THREADS / LANES];
  unsigned order[MAX_THREADS / LANES];  // of the simdgroups
  unsigned threads, simdgroup_count, turn;
  Fiber* current;
  void* caller;  // stack of metal_launch
  MetalGroup group;
  const Launch* launch;
  char* error;
  size_t error_size;
  int failed;
} run;

static __thread int launching;  // whether it is this thread of the process that runs the kernel

// Linear numbers of the thread that runs, within its threadgroup, and of the threadgroup.
EXPORT uint32_t metal_thread, metal_group;

#define OBSERVE(event, ...) \
  if (run.launch->observer && run.launch->observer->event) run.launch->observer->event(__VA_ARGS__)

static void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(run.error, run.error_size, format, arguments);
  va_end(arguments);
  run.failed = 1;
}

static unsigned line_of(unsigned site) { return site >> 12; }

// ---------------------------------------------------------------------------------------------------------------------
// Who runs next.

static unsigned lane_of(const Fiber* fiber) { return fiber->thread.thread_index_in_simdgroup; }
static unsigned simdgroup_of(const Fiber* fiber) { return fiber->thread.simdgroup_index_in_threadgroup; }

static Fiber* first_ready(unsigned simdgroup) {
  uint32_t ready = run.simdgroups[simdgroup].ready;
  unsigned lane = run.launch->order == 1 ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
  return &run.fibers[simdgroup * LANES + lane];
}

static unsigned flags_in_common(unsigned first_thread, uint32_t lanes) {
  unsigned flags = ~0u;
  for (; lanes; lanes &= lanes - 1) flags &= run.fibers[first_thread + __builtin_ctz(lanes)].flags;
  return flags;
}

// Whether both wait at the same operation, reached by the same calls.
static int at_one_place(const Fiber* one, const Fiber* other) {
  return one->site == other->site && one->name == other->name && one->path == other->path;
}

static void fail_apart(const char* of, unsigned number, const Fiber* one, const Fiber* other) {
  const char* how = one->site == other->site ? ", reached by different calls" : "";
  fail("threads of %s %u wait at different places: thread %u at %s (line %u), thread %u at %s (line %u)%s", of, number,
       one->thread.thread_index_in_threadgroup, one->name, line_of(one->site),
       other->thread.thread_index_in_threadgroup, other->name, line_of(other->site), how);
}

// All live lanes of the simdgroup wait. Fails unless at one place; true if that was a simdgroup operation, now done.
static int finish_operation(unsigned index) {
  Simdgroup* simdgroup = &run.simdgroups[index];
  Fiber* first = &run.fibers[index * LANES + __builtin_ctz(simdgroup->live)];
  for (uint32_t rest = simdgroup->live; rest; rest &= rest - 1) {
    Fiber* fiber = &run.fibers[index * LANES + __builtin_ctz(rest)];
    if (at_one_place(first, fiber)) continue;
    fail_apart("simdgroup", index, first, fiber);
    return 0;
  }
  if (first->waits == AT_BARRIER) return 0;
  simdgroup->exchange[first->turn ^ 1].lanes = simdgroup->live;
  simdgroup->ready = simdgroup->live;
  if (first->waits == AT_SIMD_OPERATION) {
    OBSERVE(exchanged, index);
  } else {
    OBSERVE(released, 1, index, flags_in_common(index * LANES, simdgroup->live));
  }
  return 1;
}

// All live threads of the threadgroup wait at barriers, or have returned. Fails unless all are at the same barrier.
static void finish_barrier(void) {
  Fiber *first = 0, *gone = 0;
  unsigned flags = ~0u;
  for (unsigned i = 0; i < run.threads; i++) {
    Fiber* fiber = &run.fibers[i];
    if (!(run.simdgroups[i / LANES].live >> (i % LANES) & 1)) {
      gone = fiber;
      continue;
    }
    flags &= fiber->flags;
    if (!first) first = fiber;
    if (!at_one_place(first, fiber)) {
      fail_apart("threadgroup", metal_group, first, fiber);
      return;
    }
  }
  if (!first) return;
  if (gone) {
    fail("a barrier that not all threads reach: thread %u waits at line %u, thread %u has returned",
         first->thread.thread_index_in_threadgroup, line_of(first->site), gone->thread.thread_index_in_threadgroup);
    return;
  }
  for (unsigned i = 0; i < run.simdgroup_count; i++) run.simdgroups[i].ready = run.simdgroups[i].live;
  run.turn = 0;
  OBSERVE(released, 0, 0, flags);
}

// The thread to go on with when the current one cannot; null when the threadgroup has ended or failed.
static Fiber* next_fiber(void) {
  unsigned index = simdgroup_of(run.current);
  Simdgroup* simdgroup = &run.simdgroups[index];
  if (simdgroup->ready || (simdgroup->live && finish_operation(index))) return first_ready(index);
  if (run.failed) return 0;
  while (++run.turn < run.simdgroup_count) {
    if (run.simdgroups[run.order[run.turn]].ready) return first_ready(run.order[run.turn]);
  }
  finish_barrier();
  for (; !run.failed && run.turn < run.simdgroup_count; run.turn++) {
    if (run.simdgroups[run.order[run.turn]].ready) return first_ready(run.order[run.turn]);
  }
  return 0;
}

static void switch_from(void** save) {
  Fiber* next = next_fiber();
  if (next && &next->stack_pointer == save) return;
  run.current = next;
  if (next) metal_thread = next->thread.thread_index_in_threadgroup;
  switch_stack(save, next ? next->stack_pointer : run.caller);
}

// Return addresses from here to the start of the thread, as one number. Each function's frame holds where the frame of
// its caller is, and beside it the return address; the first one's caller is at 0 (start_fiber).
static inline uintptr_t path_from(void** frame) {
  uintptr_t path = 0;
  for (; frame; frame = *frame) path = path * 31 + (uintptr_t)frame[1];
  return path;
}

static void wait(unsigned char waits, const char* name, unsigned site, uintptr_t path) {
  Fiber* fiber = run.current;
  fiber->path = path;
  fiber->waits = waits;
  fiber->name = name;
  fiber->site = site;
  run.simdgroups[simdgroup_of(fiber)].ready &= ~(1u << lane_of(fiber));
  switch_from(&fiber->stack_pointer);
}

EXPORT const MetalExchange* metal_exchange(size_t name, unsigned site, const void* value, unsigned size) {
  Fiber* fiber = run.current;
  MetalExchange* exchange = &run.simdgroups[simdgroup_of(fiber)].exchange[fiber->turn];
  memcpy(exchange->values + lane_of(fiber) * size, value, size);
  fiber->turn ^= 1;
  wait(AT_SIMD_OPERATION, (const char*)name, site, path_from(__builtin_frame_address(0)));
  return exchange;
}

EXPORT void metal_threadgroup_barrier(unsigned flags, unsigned site) {
  run.current->flags = flags;
  OBSERVE(arrives, metal_thread, 0, flags, site);
  wait(AT_BARRIER, "threadgroup_barrier", site, path_from(__builtin_frame_address(0)));
}

EXPORT void metal_simdgroup_barrier(unsigned flags, unsigned site) {
  run.current->flags = flags;
  run.current->turn ^= 1;
  OBSERVE(arrives, metal_thread, 1, flags, site);
  wait(AT_SIMD_BARRIER, "simdgroup_barrier", site, path_from(__builtin_frame_address(0)));
}

EXPORT void metal_atomic_load(const void* address, void* value, unsigned size) {
  OBSERVE(atomic, address, size, 0);
  memcpy(value, address, size);
}

EXPORT void metal_atomic_store(void* address, const void* value, unsigned size) {
  OBSERVE(atomic, address, size, 1);
  memcpy(address, value, size);
}

EXPORT const MetalThread* metal_current_thread(void) { return &run.current->thread; }

__attribute__((used)) void fiber_main(void) {
  Fiber* fiber = run.current;
  run.launch->entry(&fiber->thread, &run.group, run.launch->buffers);
  Simdgroup* simdgroup = &run.simdgroups[simdgroup_of(fiber)];
  uint32_t others = ~(1u << lane_of(fiber));
  simdgroup->live &= others;
  simdgroup->ready &= others;
  void* abandoned;
  switch_from(&abandoned);
}

// Ends the launch with an error. Called in a thread of the kernel, by an observer that has seen enough.
EXPORT void metal_stop(const char* text) {
  fail("%s", text);
  void* abandoned;
  run.current = 0;
  switch_stack(&abandoned, run.caller);
}

// Bounds of the running thread's stack.
EXPORT void metal_stack(uintptr_t* low, uintptr_t* high) {
  *low = (uintptr_t)run.stacks + (run.current - run.fibers) * STACK_SIZE;
  *high = *low + STACK_SIZE;
}

// ---------------------------------------------------------------------------------------------------------------------
// A fault in a kernel ends the run with a message, instead of the process.

static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
#define FAULT_COUNT (sizeof FAULTS / sizeof *FAULTS)

static struct sigaction before[FAULT_COUNT];  // actions outside of a launch

static void on_fault(int number, siginfo_t* info, void* context) {
  (void)context;
  if (!launching || !run.current) {  // not the kernel's: it happens again, with the action from before
    for (unsigned i = 0; i < FAULT_COUNT; i++) sigaction(FAULTS[i], &before[i], 0);
    return;
  }
  const char* what = number == SIGFPE   ? "integer division by zero"
                     : number == SIGILL ? "trap (an unreachable or forbidden operation)"
                                        : "access to memory that is no buffer's, not aligned, or beyond the stack";
  const unsigned* group = run.group.threadgroup_position_in_grid;
  fail("%s, thread %u of threadgroup (%u, %u, %u), address %p", what, run.current->thread.thread_index_in_threadgroup,
       group[0], group[1], group[2], info->si_addr);
  void* abandoned;
  run.current = 0;
  switch_stack(&abandoned, run.caller);
}

// The handler needs a stack of its own, because a thread's may be what overflowed.
static char fault_stack[32 << 10];

static void catch_faults(stack_t* old_stack) {
  stack_t stack = {.ss_sp = fault_stack, .ss_size = sizeof fault_stack};
  sigaltstack(&stack, old_stack);
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
  for (unsigned i = 0; i < FAULT_COUNT; i++) sigaction(FAULTS[i], &action, &before[i]);
  launching = 1;
}

static void restore_faults(const stack_t* old_stack) {
  launching = 0;
  for (unsigned i = 0; i < FAULT_COUNT; i++) sigaction(FAULTS[i], &before[i], 0);
  sigaltstack(old_stack, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launch.

static int make_stacks(unsigned count) {
  if (!run.stacks) {
    void* memory = mmap(0, (size_t)MAX_THREADS * STACK_SIZE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return 0;
    run.stacks = memory;
  }
  for (; run.stacks_made < count; run.stacks_made++) {
    if (mprotect(run.stacks + (size_t)run.stacks_made * STACK_SIZE, GUARD_SIZE, PROT_NONE)) return 0;
  }
  return 1;
}

static void start_fiber(unsigned index, const unsigned position[3]) {
  Fiber* fiber = &run.fibers[index];
  MetalThread* thread = &fiber->thread;
  for (int axis = 0; axis < 3; axis++) {
    thread->thread_position_in_threadgroup[axis] = position[axis];
    thread->thread_position_in_grid[axis] =
        run.group.threadgroup_position_in_grid[axis] * run.launch->threadgroup[axis] + position[axis];
  }
  thread->thread_index_in_threadgroup = index;
  thread->thread_index_in_simdgroup = index % LANES;
  thread->simdgroup_index_in_threadgroup = index / LANES;
  fiber->waits = NOT_WAITING;
  fiber->turn = 0;
  // Tops of stacks that lie a power of two apart would share few cache lines: shift each by another amount.
  uintptr_t top = (uintptr_t)run.stacks + (size_t)(index + 1) * STACK_SIZE - index % 61 * 64 - 64;
  void** stack = (void**)top - FRAME_WORDS;
  memset(stack, 0, FRAME_WORDS * sizeof *stack);
  stack[RETURN_WORD] = (void*)fiber_start;
  fiber->stack_pointer = stack;
}

static void shuffle(unsigned* order, unsigned count, unsigned random) {
  for (unsigned i = count; i > 1; i--) {
    random = random * 1664525u + 1013904223u;
    unsigned j = (random >> 8) % i, kept = order[j];
    order[j] = order[i - 1];
    order[i - 1] = kept;
  }
}

static void run_threadgroup(unsigned number, const unsigned groups[3]) {
  MetalGroup* group = &run.group;
  const Launch* launch = run.launch;
  unsigned at[3] = {number % groups[0], number / groups[0] % groups[1], number / groups[0] / groups[1]};
  run.threads = 1;
  for (int axis = 0; axis < 3; axis++) {
    unsigned left = launch->grid[axis] - at[axis] * launch->threadgroup[axis];
    group->threadgroup_position_in_grid[axis] = at[axis];
    group->threads_per_threadgroup[axis] = left < launch->threadgroup[axis] ? left : launch->threadgroup[axis];
    run.threads *= group->threads_per_threadgroup[axis];
  }
  run.simdgroup_count = group->simdgroups_per_threadgroup = (run.threads + LANES - 1) / LANES;
  const unsigned* size = group->threads_per_threadgroup;
  for (unsigned i = 0; i < run.threads; i++) {
    start_fiber(i, (unsigned[]){i % size[0], i / size[0] % size[1], i / size[0] / size[1]});
  }
  for (unsigned i = 0; i < run.simdgroup_count; i++) {
    unsigned lanes = run.threads - i * LANES;
    run.simdgroups[i].live = run.simdgroups[i].ready = lanes < LANES ? (1u << lanes) - 1 : ~0u;
    run.order[i] = launch->order == 1 ? run.simdgroup_count - 1 - i : i;
  }
  if (launch->order == 2) shuffle(run.order, run.simdgroup_count, launch->seed + number);
  memset((void*)launch->threadgroup_memory[0], 0xff, launch->threadgroup_memory[1]);
  metal_group = number;
  OBSERVE(group_begins, number);
  run.turn = 0;
  run.current = first_ready(run.order[0]);
  metal_thread = run.current->thread.thread_index_in_threadgroup;
  switch_stack(&run.caller, run.current->stack_pointer);
  run.current = 0;
}

// What all threads are told of the grid. `groups` are threadgroups along each axis.
static void describe_grid(unsigned groups[3]) {
  const Launch* launch = run.launch;
  MetalGroup* group = &run.group;
  unsigned most = 1;
  memset(group, 0, sizeof *group);
  for (int axis = 0; axis < 3; axis++) {
    groups[axis] = (launch->grid[axis] + launch->threadgroup[axis] - 1) / launch->threadgroup[axis];
    most *= launch->threadgroup[axis];
    group->threads_per_grid[axis] = launch->grid[axis];
    group->dispatch_threads_per_threadgroup[axis] = launch->threadgroup[axis];
    group->threadgroups_per_grid[axis] = groups[axis];
  }
  group->dispatch_simdgroups_per_threadgroup = (most + LANES - 1) / LANES;
  unsigned memory = launch->threadgroup_memory[1];
  if (most > MAX_THREADS) {
    fail("%u threads a threadgroup, Metal takes at most %u", most, MAX_THREADS);
  } else if (memory > THREADGROUP_MEMORY) {
    fail("%u bytes of threadgroup memory, Metal gives %u", memory, THREADGROUP_MEMORY);
  } else if (!make_stacks(most)) {
    fail("no memory for the stacks of %u threads", most);
  }
}

// Runs the grid. 0, or 1 with a message in `error`.
EXPORT int metal_launch(const Launch* launch, char* error, size_t error_size) {
  run.launch = launch;
  run.error = error;
  run.error_size = error_size;
  run.failed = 0;
  unsigned groups[3];
  describe_grid(groups);
  if (run.failed) return 1;

  unsigned count = groups[0] * groups[1] * groups[2];
  stack_t old_stack;
  catch_faults(&old_stack);
  for (unsigned i = 0; i < count && !run.failed; i++) {
    unsigned number = launch->order == 1 ? count - 1 - i : i;
    if (launch->order == 2) number = (number + launch->seed) % count;
    run_threadgroup(number, groups);
  }
  restore_faults(&old_stack);
  return run.failed;
}

// Rounds a float to bfloat, ties to even: the compiler calls it where the processor has no such instruction.
EXPORT __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint16_t top = (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  __bf16 result;
  memcpy(&result, &top, sizeof result);
  return result;
}
