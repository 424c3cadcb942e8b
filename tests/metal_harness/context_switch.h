// Context switch: saves what the calling convention asks a function to keep, changes the stack, restores. Included once.
#pragma once

void switch_stack(void** save, void* load);
void fiber_start(void);

#if defined(__x86_64__)
enum { FRAME_WORDS = 7, RETURN_WORD = 6 };
__asm__(
    ".text\n.globl switch_stack\n.hidden switch_stack\n.type switch_stack,@function\nswitch_stack:\n"
    "  pushq %rbx\n  pushq %rbp\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbp\n  popq %rbx\n"
    "  retq\n"
    ".globl fiber_start\n.hidden fiber_start\n.type fiber_start,@function\nfiber_start:\n"
    "  callq fiber_main\n  ud2\n");
#elif defined(__aarch64__)
enum { FRAME_WORDS = 20, RETURN_WORD = 19 };
__asm__(
    ".text\n.globl switch_stack\n.hidden switch_stack\n.type switch_stack,%function\nswitch_stack:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp d8, d9, [sp, #80]\n  stp d10, d11, [sp, #96]\n  stp d12, d13, [sp, #112]\n"
    "  stp d14, d15, [sp, #128]\n  stp x29, x30, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp d8, d9, [sp, #80]\n  ldp d10, d11, [sp, #96]\n  ldp d12, d13, [sp, #112]\n"
    "  ldp d14, d15, [sp, #128]\n  ldp x29, x30, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n"
    ".globl fiber_start\n.hidden fiber_start\n.type fiber_start,%function\nfiber_start:\n"
    "  bl fiber_main\n  brk #1\n");
#else
#error "no context switch for this processor: add one, x86-64 and arm64 are the examples"
#endif
