// Switches stacks on x86-64, and reports that to the sanitizers.
#include "fiber.hpp"

#include <sys/mman.h>

#include <new>

#ifndef __x86_64__
#error "emulator/fiber.cpp switches stacks on x86-64 only"
#endif

// Saves what a call must keep on the stack of the caller, and takes the same from another stack.
extern "C" void emulator_switch_stack(void** save, void* load);
asm(R"(
.text
.globl emulator_switch_stack
.hidden emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack, .-emulator_switch_stack
)");

namespace emulator {
namespace {

void ignore(bool on) {
  if (AnnotateIgnoreReadsBegin == nullptr) return;  // not built with the sanitizer
  (on ? AnnotateIgnoreReadsBegin : AnnotateIgnoreReadsEnd)(__FILE__, __LINE__);
  (on ? AnnotateIgnoreWritesBegin : AnnotateIgnoreWritesEnd)(__FILE__, __LINE__);
}

}  // namespace

Unseen::Unseen() { ignore(true); }
Unseen::~Unseen() { ignore(false); }

void device_reads(const void* at, size_t bytes) {
  if (__tsan_read_range == nullptr || bytes == 0) return;
  ignore(false);
  __tsan_read_range(const_cast<void*>(at), bytes);
  ignore(true);
}

void device_writes(void* at, size_t bytes) {
  if (__tsan_write_range == nullptr || bytes == 0) return;
  ignore(false);
  __tsan_write_range(at, bytes);
  ignore(true);
}

namespace {

constexpr size_t kGuard = 4096;
constexpr size_t kStack = size_t{256} << 10;  // frames without optimization are large

}  // namespace

Fiber::Fiber(void (*entry)()) {
  bytes_ = kStack;
  void* mapping = mmap(nullptr, kGuard + bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(mapping);
  mprotect(mapping_, kGuard, PROT_NONE);
  low_ = mapping_ + kGuard;
  // What switching takes off a stack: six registers and the address of `entry`, which then finds
  // the stack as after a call.
  auto** top = reinterpret_cast<void**>(mapping_ + kGuard + bytes_);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  top_ = top;
  if (__tsan_create_fiber) tsan_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (mapping_ == nullptr) return;
  // Unmapped memory may become another thread's stack, which must not be poisoned.
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(mapping_ + kGuard, bytes_);
  munmap(mapping_, kGuard + bytes_);
  if (__tsan_destroy_fiber) __tsan_destroy_fiber(tsan_);
}

void Fiber::arrived(Fiber& from) {
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(nullptr, &from.low_, &from.bytes_);
}

void Fiber::adopt() {
  if (__tsan_get_current_fiber) tsan_ = __tsan_get_current_fiber();
}

void Fiber::run(Fiber& from) {
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&from.asan_, low_, bytes_);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(tsan_, kNoSync);
  emulator_switch_stack(&from.top_, top_);
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(from.asan_, nullptr, nullptr);
}

}  // namespace emulator
