// Values that other threads read during a write, ranks that leave each other's processor, what
// wakes them, and the end of a process.
#include "os/processor.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/atomic_words.h"
#include "harness.h"
#include "os/process.h"
#include "os/socket.h"
#include "os/wake_event.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::os;
using namespace ranks;
using namespace std::chrono_literals;

struct Pair {
  uint64_t a, b;
};

const Test kPublished("a reader sees the values in the order of the writes", [] {
  Published<Pair> published;
  std::atomic<bool> ended{false};
  std::thread writer([&] {
    for (uint64_t i = 1; i <= 200'000; ++i) published.store({i, ~i});
    ended = true;
  });
  uint64_t mixed = 0, last = 0, decreased = 0;
  do {
    const Pair seen = published.load();
    if (seen.a != 0) mixed += seen.b != ~seen.a;
    decreased += seen.a < last;
    last = seen.a;
  } while (!ended);
  writer.join();
  expect_equal(mixed, uint64_t{0}, "mixed values");
  expect_equal(decreased, uint64_t{0}, "values older than the last one");
  expect_equal(published.load().a, uint64_t{200'000}, "the last value");
});

// Runs `between` once, after the first word of the next store or load.
class SteppedWords {
 public:
  static inline std::function<void()> between;

  void store(const Pair& value) {
    value_.a = value.a;
    step();
    value_.b = value.b;
  }
  Pair load() const {
    const uint64_t a = value_.a;
    step();
    return {a, value_.b};
  }

 private:
  static void step() {
    if (const auto body = std::exchange(between, {})) body();
  }
  Pair value_{};
};

const Test kReadDuringWrite("a read during a write gives no value", [] {
  Published<Pair, SteppedWords> published;
  published.store({1, 1});
  bool read = false;
  SteppedWords::between = [&] {
    read = true;
    expect(!published.try_load(), "a mix of two values");
  };
  published.store({2, 2});
  expect(read, "the read was during the write");
  expect_equal(published.load().b, uint64_t{2}, "after the write");
});

const Test kWriteDuringRead("a write during a read is detected", [] {
  Published<Pair, SteppedWords> published;
  published.store({1, 1});
  SteppedWords::between = [&] { published.store({2, 2}); };
  expect(!published.try_load(), "a mix of two values");
  SteppedWords::between = [&] { published.store({3, 3}); };
  const Pair seen = published.load();
  expect(seen.a == 3 && seen.b == 3, "load() reads again");
});

std::vector<int> processors_of(const cpu_set_t& mask) {
  std::vector<int> found;
  for (int i = 0; i < CPU_SETSIZE; ++i)
    if (CPU_ISSET(static_cast<size_t>(i), &mask)) found.push_back(i);
  return found;
}

std::vector<int> allowed() {
  cpu_set_t mask{};
  expect(::sched_getaffinity(0, sizeof mask, &mask) == 0, "the affinity mask");
  return processors_of(mask);
}

void restrict_to(int processor) {
  cpu_set_t mask{};
  CPU_SET(static_cast<size_t>(processor), &mask);
  expect(::sched_setaffinity(0, sizeof mask, &mask) == 0, "one processor");
}

// On a thread of its own, whose mask does not matter to other tests.
void on_a_thread(const std::function<void()>& body) {
  std::exception_ptr failed;
  std::thread([&] {
    try {
      body();
    } catch (...) {  // passed on to the test
      failed = std::current_exception();
    }
  }).join();
  if (failed) std::rethrow_exception(failed);
}

const Test kLeaves("a thread leaves a processor, and its mask returns", [] {
  on_a_thread([] {
    const std::vector<int> before = allowed();
    if (before.size() < 2) return;
    for (int round = 0; round < 50; ++round) {
      const int here = current_processor();
      {
        ProcessorExclusion exclusion;
        expect(exclusion.leave(here, {}), "there is another processor");
        expect(current_processor() != here, "it left");
        const int there = current_processor();
        expect(exclusion.leave(there, std::array{here}), "it leaves again");
        expect(current_processor() != there, "it left the second one");
      }
      expect(allowed() == before, "the mask is the one before");
    }
  });
});

const Test kTaken("a thread prefers processors that are not taken", [] {
  on_a_thread([] {
    const std::vector<int> before = allowed();
    const int here = current_processor();
    std::vector<int> taken = before;
    if (before.size() < 2) return;
    const int free = before[before[0] == here ? 1 : 0];
    std::erase(taken, free);
    ProcessorExclusion exclusion;
    expect(exclusion.leave(here, taken), "one is free");
    expect_equal(current_processor(), free, "processor");
    expect(exclusion.leave(free, before), "all are taken: any other one");
    expect(current_processor() != free, "it left");
  });
});

const Test kStays("a thread that is bound to one processor stays there", [] {
  on_a_thread([] {
    const int here = allowed()[0];
    restrict_to(here);
    {
      ProcessorExclusion exclusion;
      expect(!exclusion.leave(here, {}), "there is no other processor");
      expect(allowed() == std::vector<int>{here}, "the mask is unchanged");
    }
    expect(allowed() == std::vector<int>{here}, "the mask is unchanged after");
  });
});

// `again`: the thread tries to leave a second time.
void foreign_mask_test(bool again) {
  on_a_thread([again] {
    const std::vector<int> before = allowed();
    if (before.size() < 2) return;
    const int here = current_processor();
    {
      ProcessorExclusion exclusion;
      expect(exclusion.leave(here, {}), "there is another processor");
      restrict_to(here);
      if (again) expect(!exclusion.leave(here, {}), "the new mask has no other processor");
      expect(allowed() == std::vector<int>{here}, "the new mask during the wait");
    }
    expect(allowed() == std::vector<int>{here}, "the new mask after the wait");
  });
}
const Test kKeepsForeignMask("a mask that another program sets meanwhile stays",
                             [] { foreign_mask_test(false); });
const Test kLeavesInForeignMask("a thread that leaves again stays in a mask set meanwhile",
                                [] { foreign_mask_test(true); });

const Test kProcessors("ends that share memory know each other's processor", [] {
  for (const std::string by : {"local", "shm"}) {
    const ranks::Ends pair = ranks::channel_pair(by, size_t{64} << 10);
    expect_equal(pair.a->swap_processors(3), -1, "before the other end published any");
    expect_equal(pair.b->swap_processors(5), 3, "processor of a");
    expect_equal(pair.a->swap_processors(4), 5, "processor of b");
    expect_equal(pair.b->swap_processors(5), 4, "the new processor of a");
  }
  const ranks::Ends pair = ranks::channel_pair("tcp", size_t{64} << 10);
  expect_equal(pair.a->swap_processors(3), -1, "no memory");
  expect_equal(pair.b->swap_processors(3), -1, "no memory");
});

const Test kWoken("one event wakes a rank for all its channels in shared memory", [] {
  for (const std::string by : {"local", "shm"}) {
    const WakeEvent event;
    std::vector<Ends> pairs;
    for (int i = 0; i < 3; ++i) {
      pairs.push_back(channel_pair(by, size_t{128} << 10));
      pairs.back().a->wake_by(event);
    }
    const auto expect_woken = [&](bool by_socket, const std::string& when) {
      std::vector<pollfd> none;
      expect_equal(event.poll(none, by_socket ? 10s : 0s), int{by_socket}, by + ", " + when);
      for (const Ends& pair : pairs) pair.a->disarm(0);
    };
    const auto sleep = [&] {
      for (const Ends& pair : pairs)
        expect_equal(pair.a->arm({.receive = true}).fd, -1, by + ": a descriptor to poll");
    };
    sleep();
    expect_woken(false, "nothing was sent");
    for (const size_t sender : {1, 0, 2}) {
      sleep();
      const std::byte sent{7};
      pairs[sender].b->send({&sent, 1}, {});
      expect_woken(true, "a byte was sent");
      expect_woken(false, "the wake-up was taken");
      std::byte got{};
      for (size_t i = 0; i < pairs.size(); ++i)
        expect_equal(pairs[i].a->receive({&got, 1}), size_t{i == sender}, by + ": bytes");
    }
    event.notify();
    expect(poll_one(event.descriptor(), POLLIN, 0s) != 0, by + ": notified");
    event.clear();
    expect_woken(false, "cleared");
    pairs[2].b->close({});
    expect_woken(true, "a peer closed");
    for (size_t i = 0; i < pairs.size(); ++i)
      expect_equal(pairs[i].a->is_closed(), i == 2, by + ": closed");
    expect_woken(false, "a closed channel is not watched");
    pairs[1].a->close({});
    pairs[1].b->close({});
    expect_woken(false, "this end closed");
  }
});

const Test kProcess("objects for one process share a descriptor, and notice its end", [] {
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it ends also if an expectation below fails
    if (::getppid() == parent) ::pause();
    ::_exit(0);
  }
  Process first(child), second(child);
  expect_equal(first.descriptor(), second.descriptor(), "descriptors");
  expect(!first.look(), "it lives");
  ::kill(child, SIGKILL);
  expect(poll_one(first.descriptor(), POLLIN, 10s) != 0, "its end");
  Process late(child);  // as if another process had its id now
  expect(late.descriptor() != first.descriptor(), "a descriptor of its own");
  for (Process* one : {&first, &second, &late}) expect(one->look(), "it ended");
  ::waitpid(child, nullptr, 0);
  expect(Process(child).ended(), "no such process");
});

}  // namespace
