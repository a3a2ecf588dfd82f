// The enqueued calls of a group on devices: complete unless they were aborted, else ended by the
// first cause. Devices and executors are simulated.
#include "device_group/watchdog.h"

#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "device_group/device_executor.h"
#include "harness.h"
#include "played_devices.h"
#include "ranks.h"

namespace {

using namespace pycomm;
using namespace std::chrono_literals;
using played::PlayedDevice;

class PlayedCarrier final : public device_group::DeviceExecutor {
 public:
  bool troubled = false;

  Algorithm algorithm_for(const group::Call&) const override { return Algorithm::nccl; }
  void prepare(device_group::Launch&) override {}
  std::shared_ptr<device::Event> enqueue(const device_group::Launch&) override { return nullptr; }
  bool is_connected(const group::Call&) const override { return true; }
  group::Stats stats() const override { return {}; }
  std::optional<Error> async_error(const std::string& what) override {
    if (!troubled) return std::nullopt;
    return PeerLost(what + " was given up");
  }
  void close(const Deadline&) noexcept override {}
  void abort(const std::string&) noexcept override { troubled = false; }
};

struct Watched {
  explicit Watched(std::shared_ptr<group::Group> group = ranks::World{}.join(0))
      : host(std::move(group)) {}
  std::shared_ptr<group::Group> host;
  std::shared_ptr<PlayedDevice> device = std::make_shared<PlayedDevice>();
  PlayedCarrier executor;
  device_group::Watchdog watchdog{
      *host, [this](const std::string& what) { return executor.async_error(what); }};
  std::shared_ptr<device_group::DeviceWork> work = std::make_shared<device_group::DeviceWork>(
      [this](const device::Event& end_event) { return watchdog.is_over(end_event); });

  void begin(std::chrono::nanoseconds limit = 60s, std::vector<int> peers = {}) {
    watchdog.add("all_reduce(of a test)", std::move(peers), Deadline(limit), work);
  }
  std::shared_ptr<device::Event> add(std::chrono::nanoseconds limit = 60s,
                                     std::vector<int> peers = {}) {
    auto over = std::make_shared<device::Event>(device);
    begin(limit, std::move(peers));
    watchdog.set_end(over);
    return over;
  }
};

const Test kOver("a call is complete when its event has passed", [] {
  Watched all;
  const auto over = all.add();
  expect(!all.watchdog.is_over(*over), "under way");
  all.device->through = true;
  expect(all.watchdog.is_over(*over), "passed");
  expect(all.watchdog.idle(), "and forgotten");
  all.executor.troubled = true;
  expect(all.watchdog.is_over(*over), "a later look concerns no finished call");
  expect(!all.watchdog.look(), "a look without calls found something");
});

const Test kGivenUp("... but not if it was aborted, until that is reported", [] {
  Watched all;
  const auto over = all.add();
  all.executor.troubled = true;
  all.device->through = true;  // as its stream continues then
  expect(!all.watchdog.is_over(*over), "not reported yet");
  expect(!all.work->error(), "no rank was notified");
  const auto error = all.watchdog.look();
  expect(error && error->kind() == ErrorKind::peer_lost, "why");
  expect(std::string(error->what()).starts_with("all_reduce(of"), "which");
  expect(all.watchdog.end(*error), "it ended before");
  expect(static_cast<bool>(all.work->error()), "told");
  expect(all.watchdog.is_over(*over), "and over");
});

const Test kLate("a call that is not complete at its limit is named", [] {
  Watched all;
  (void)all.add(1ns);
  const auto error = all.watchdog.look();
  expect(error && error->kind() == ErrorKind::timeout, "a timeout");
  const std::string said = error->what();
  expect(said.starts_with("all_reduce(of a test)"), said);
  expect_says(said, "did not complete on the device");
});

const Test kAgreeing("... unless the agreement names the cause within a second", [] {
  Watched all;
  (void)all.add(1ns);
  all.executor.troubled = true;
  expect(!all.watchdog.look(true), "it did not wait");
  const Deadline limit(60s);
  while (!all.watchdog.look(true) && !limit.expired()) std::this_thread::yield();
  expect(!limit.expired(), "it waits permanently");
});

const Test kEnqueueing("a call is watched while it is enqueued", [] {
  Watched all;
  all.device->through = true;
  all.begin(1ns);
  expect(!all.watchdog.idle(), "begun");
  const auto error = all.watchdog.look();
  expect(error && error->kind() == ErrorKind::timeout, "a timeout");
  const std::string said = error->what();
  expect_says(said, "could not be enqueued");
  expect(all.watchdog.end(*error), "it ended before");
  expect(static_cast<bool>(all.work->error()), "told");
  const auto ends = ranks::ending_of([&] { all.watchdog.set_end(nullptr); });
  ends.check(ErrorKind::timeout);
  const auto begins = ranks::ending_of([&] { all.begin(); });
  begins.check(ErrorKind::timeout);
  expect(all.watchdog.idle(), "an ended call does not return");
  Watched captured;
  captured.begin();
  captured.watchdog.set_end(nullptr);
  expect(captured.watchdog.idle(), "a captured call is not watched");
});

const Test kOnce("a group ends once, and its mismatch is thrown once", [] {
  Watched all;
  all.watchdog.throw_mismatch();
  expect(all.watchdog.end(Mismatch("first")), "it ended before");
  expect(!all.watchdog.end(Timeout("second")), "it ended twice");
  expect(!all.watchdog.close(), "it was closed");
  expect(all.watchdog.cause()->kind() == ErrorKind::mismatch, "another cause");
  const auto first = ranks::ending_of([&] { all.watchdog.throw_mismatch(); });
  first.check(ErrorKind::mismatch);
  all.watchdog.throw_mismatch();
  Watched closed;
  expect(closed.watchdog.close() && closed.watchdog.ended(), "it did not end");
  expect(!closed.watchdog.cause(), "close() is no error");
});

const Test kNeeded("a rank that leaves ends the calls that need it, and no others", [] {
  ranks::World world{.size = 3, .transport = "tcp", .heartbeat = 500ms, .apart = true};
  std::latch over(1);
  ranks::run_groups(world, [&](group::Group& group) {
    if (group.rank() == 2) return group.close();
    if (group.rank() == 1) return over.wait();
    const CountDown tell{over};
    const std::shared_ptr<group::Group> host(&group, [](group::Group*) {});  // not its owner
    Watched message(host), all(host);
    (void)message.add(60s, {1});
    (void)all.add();
    std::optional<Error> missed;
    for (const Deadline deadline(60s); !missed && !deadline.expired();) {
      (void)message.watchdog.look();
      missed = all.watchdog.look();
    }
    expect(!message.watchdog.look(), "it needs rank 1 alone");
    expect(missed && missed->kind() == ErrorKind::peer_lost, "it needs rank 2");
    expect_equal(missed->fields().peer, 2, "the lost rank");
    expect_says(missed->what(), "waits on the device for rank 2 (host2, pid ");
  });
});

}  // namespace
