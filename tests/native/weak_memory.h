// A model checker for code without locks: it runs a few threads in every order of their atomic
// operations and with every value that a weak memory may return, and reports the first fault.
//
// The model is C++20's with operational views, as in RC11. A location has a history of messages in
// modification order; a message carries the view of its writer if it was released. A thread has a
// view, below which it reads nothing. A load may return any message that the view allows. A store
// may precede messages that the thread has not seen. Loads do not return later stores of other
// threads (no load buffering), which no processor does if a dependency orders them.
//
//   Atomic<T>   std::atomic<T>'s operations
//   Data<T>     plain memory; an access that no happens-before orders is a fault
//   Socket      a wake-up that orders nothing; a wait that never ends is a fault
//
// A Scenario is constructed again for each execution. `run` is called for each thread on a fiber of
// its own, and `end` after all threads.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

namespace weak {

inline constexpr int kMostThreads = 4, kMostLocations = 24;

// What a thread has seen: the oldest message that it may read, by location, and which accesses
// happened before, by thread.
struct View {
  std::array<uint64_t, kMostLocations> messages{};
  std::array<uint32_t, kMostThreads + 1> clock{};  // the last one: construction of the scenario

  void join(const View& other);
  void join_messages(const View& other);
};

int add_location(uint64_t value);
uint64_t load(int location, std::memory_order order);
void store(int location, uint64_t value, std::memory_order order);
// A read-modify-write; `change` returns false to store nothing (a failed comparison).
uint64_t change(int location, std::memory_order order,
                const std::function<bool(uint64_t& value)>& change);

// The threads' accesses to plain memory.
struct Accesses {
  View reads, writes;  // only their clocks are used
};
void read(Accesses& accesses);
void write(Accesses& accesses);

// Ends the execution with a fault if `holds` is false.
void require(bool holds, const char* what);
// The last load of this thread did not return what the thread waits for: continues after another
// store to that location. A thread that waits forever is a fault.
void retry();

template <typename T>
class Atomic {
 public:
  Atomic(T value = T{}) : location_(add_location(bits(value))) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order order = std::memory_order_seq_cst) const {
    return static_cast<T>(weak::load(location_, order));
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    weak::store(location_, bits(value), order);
  }
  T exchange(T value, std::memory_order order = std::memory_order_seq_cst) {
    return modify(order, [&](uint64_t& now) { return now = bits(value), true; });
  }
  T fetch_or(T value, std::memory_order order = std::memory_order_seq_cst) {
    return modify(order, [&](uint64_t& now) { return now |= bits(value), true; });
  }
  T fetch_and(T value, std::memory_order order = std::memory_order_seq_cst) {
    return modify(order, [&](uint64_t& now) { return now &= bits(value), true; });
  }
  bool compare_exchange_strong(T& expected, T value,
                               std::memory_order order = std::memory_order_seq_cst) {
    const T wanted = expected;
    expected = modify(order, [&](uint64_t& now) {
      if (now != bits(wanted)) return false;
      return now = bits(value), true;
    });
    return expected == wanted;
  }

 private:
  static uint64_t bits(T value) { return static_cast<uint64_t>(value); }
  T modify(std::memory_order order, const std::function<bool(uint64_t&)>& how) {
    return static_cast<T>(change(location_, order, how));
  }

  int location_;
};

// For the product's templates.
struct Atomics {
  template <typename T>
  using Atomic = weak::Atomic<T>;
  static void store_load_fence();
  static void release_fence();
};

template <typename T>
class Data {
 public:
  T get() const {
    read(accesses_);
    return value_;
  }
  void set(T value) {
    write(accesses_);
    value_ = value;
  }

 private:
  mutable Accesses accesses_;
  T value_{};
};

class Socket {
 public:
  Socket();
  void wake();
  void wait();

 private:
  int location_;
};

class Scenario {
 public:
  virtual ~Scenario() = default;
  virtual void run(int thread) = 0;
  virtual void end() {}
};

struct Result {
  std::string fault;        // empty: none
  uint64_t executions = 0;  // complete ones
  uint64_t pruned = 0;      // equal to another one up to the order of independent operations
};

// Runs `threads` threads of the scenario. Throws Failure after `most` executions. `all`: also those
// that differ only in the order of independent operations.
Result explore(int threads, const std::function<Scenario*()>& make, uint64_t most,
               bool all = false);

template <typename S, typename... Arguments>
Result explore(int threads, uint64_t most, Arguments... arguments) {
  return explore(threads, [=]() -> Scenario* { return new S(arguments...); }, most);
}

}  // namespace weak
