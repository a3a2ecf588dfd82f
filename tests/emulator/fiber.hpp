// A fiber: a stack of its own that sanitizers know about. Not a scheduler; grid.cpp is.
#pragma once

#include <cstddef>

namespace emulator {

// Present only in a process that runs under the sanitizer.
extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
[[gnu::weak]] void __tsan_read_range(void* at, unsigned long bytes);
[[gnu::weak]] void __tsan_write_range(void* at, unsigned long bytes);
[[gnu::weak]] void AnnotateIgnoreReadsBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreReadsEnd(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesEnd(const char* file, int line);
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* p, size_t bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* p, size_t bytes);
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save, const void* low, size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* save, const void** low, size_t* bytes);
}

// A point in the happens-before order of ThreadSanitizer: an acquire sees earlier releases.
class Token {
 public:
  void release() {
    if (__tsan_release) __tsan_release(this);
  }
  void acquire() {
    if (__tsan_acquire) __tsan_acquire(this);
  }

 private:
  char place_ = 0;
};

// An operation has its stream's place in the happens-before order, but runs on the stack and heap
// of any thread, without that order. During the lifetime of this object ThreadSanitizer sees only
// the device memory that device_reads() and device_writes() report. Kernels run on their own fibers
// and stay visible.
class Unseen {
 public:
  Unseen();
  ~Unseen();
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};
void device_reads(const void* at, size_t bytes);
void device_writes(void* at, size_t bytes);

inline constexpr unsigned kNoSync = 1;  // a switch between fibers orders nothing

// The default constructor represents the calling thread, which has a stack already.
class Fiber {
 public:
  Fiber() = default;
  explicit Fiber(void (*entry)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves `from`, which must be running, for this one.
  void run(Fiber& from);
  // `entry` calls it first; `from` is the fiber that switched to it. Reports the stack of `from` to
  // the sanitizers.
  static void arrived(Fiber& from);
  // Stores ThreadSanitizer's handle of a thread's own fiber.
  void adopt();

 private:
  void* top_ = nullptr;  // saved stack pointer
  char* mapping_ = nullptr;
  const void* low_ = nullptr;  // lowest byte of the stack, above a guard page
  size_t bytes_ = 0;
  void* asan_ = nullptr;
  void* tsan_ = nullptr;
};

}  // namespace emulator
