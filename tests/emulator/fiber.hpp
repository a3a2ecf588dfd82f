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

// A place in the happens-before order of ThreadSanitizer: who acquires sees what was released.
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

// An operation runs in its stream's place of the happens-before order, but on the stack and with
// the heap of whichever thread is at hand, in no such order. While this lives ThreadSanitizer sees
// nothing of the calling fiber but what device_reads() and device_writes() tell: the memory of the
// device. Kernels run on fibers of their own and are seen.
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

// The default constructed one stands for the thread that calls, which has its stack already.
class Fiber {
 public:
  Fiber() = default;
  explicit Fiber(void (*entry)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves `from`, which must be running, for this one.
  void run(Fiber& from);
  // The first thing that `entry` does; `from` is who ran it. Tells the sanitizers where `from`
  // lies.
  static void arrived(Fiber& from);
  // A thread's own fiber learns what ThreadSanitizer calls it.
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
