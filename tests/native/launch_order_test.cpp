// The order in which the groups of a device enqueue their calls: that of the calls of each thread.
#include "device_group/launch_order.h"

#include <atomic>
#include <chrono>
#include <latch>
#include <string>
#include <thread>

#include "core/errors.h"
#include "harness.h"

namespace {

using namespace pycomm;
using namespace std::chrono_literals;
using device_group::LaunchOrder;

bool never() { return false; }

const Test kThread("a call waits for the earlier calls of its thread", [] {
  LaunchOrder order("a device");
  const auto first = order.take("first"), second = order.take("second");
  const Deadline deadline(60s);
  std::latch waits(1);
  std::atomic<bool> ended = false, early = false;
  std::jthread worker([&] {
    second->wait(deadline, [&] {
      if (!waits.try_wait()) waits.count_down();
      return false;
    });
    early = !ended;
  });
  waits.wait();
  expect(first->is_first() && !second->is_first(), "the first is another");
  first->wait(Deadline(60s), never);
  ended = true;
  first->end();
  worker.join();
  expect(!early, "the second call came first");
  expect(!deadline.expired(), "the second call was not woken");
});

const Test kEnds("a call that fails lets the next one proceed", [] {
  LaunchOrder order("a device");
  auto first = order.take("first");
  const auto second = order.take("second");
  first = nullptr;
  second->wait(Deadline(0s), never);
});

const Test kThreads("calls of other threads and devices are not waited for", [] {
  LaunchOrder order("a device");
  const auto held = order.take("held");
  LaunchOrder("another device").take("b")->wait(Deadline(0s), never);
  std::string why;
  std::jthread([&] {
    try {
      order.take("c")->wait(Deadline(0s), never);
    } catch (const Error& error) {  // reported on the test's thread
      why = error.what();
    }
  }).join();
  expect(why.empty(), why);
});

const Test kShared("groups of one device share its order", [] {
  LaunchOrder one("a device"), other("a device");
  const auto held = one.take("held"), late = other.take("late");
  (void)expect_throws<Timeout>([&] { late->wait(Deadline(0s), never); });
});

const Test kLate("the error of a call names the earlier one", [] {
  LaunchOrder order("a device");
  const auto first = order.take("all_reduce of group a");
  const auto second = order.take("second");
  const std::string why = expect_throws<Timeout>([&] { second->wait(Deadline(1ms), never); });
  expect_says(why, "after all_reduce of group a");
});

const Test kStopped("an abort ends the wait", [] {
  LaunchOrder order("a device");
  const auto first = order.take("first"), second = order.take("second");
  std::latch waits(1);
  std::atomic<bool> stopped = false;
  std::jthread worker([&] {
    second->wait(Deadline(60s), [&] {
      if (!stopped) waits.count_down(waits.try_wait() ? 0 : 1);
      return stopped.load();
    });
  });
  waits.wait();
  stopped = true;
  order.wake();
  worker.join();
});

}  // namespace
