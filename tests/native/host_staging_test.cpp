// Messages that a device stages in host memory: the order of copies, calls and waits, in pieces.
// tests/emulator/host_staging_channel_test.cpp runs them between ranks.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/detached_calls.h"
#include "device/host_staging_channel.h"
#include "harness.h"
#include "played_devices.h"

using namespace pycomm;
using namespace pycomm::device;

namespace {

constexpr size_t kPiece = 1024;
constexpr std::chrono::seconds kLong{60};

// A device whose streams run an operation when a test says so.
class SteppedDevice final : public played::PlayedDevice {
 public:
  enum class Kind { copy, call, wait_for_host, event };
  using Queue = std::deque<std::pair<Kind, std::function<bool()>>>;  // false: cannot start

  void* make_stream() override { return streams_.emplace_back(std::make_unique<Queue>()).get(); }
  void* make_event() override { return events_.emplace_back(std::make_unique<Event>()).get(); }
  void* allocate_host(size_t bytes) override {
    return memory_.emplace_back(std::make_unique<std::vector<std::byte>>(bytes))->data();
  }
  void record(void* raw, void* stream) override {
    auto* const event = static_cast<Event*>(raw);
    add(stream, Kind::event, [event, at = ++event->recorded] { return event->passed = at, true; });
  }
  void wait(void* stream, void* raw) override {
    auto* const event = static_cast<Event*>(raw);
    add(stream, Kind::event, [event, at = event->recorded] { return event->passed >= at; });
  }
  void call(void* stream, void (*body)(void*), void* data) override {
    add(stream, Kind::call, [=] { return body(data), true; });
  }
  void wait_until(void* stream, const uint32_t* at, uint32_t value) override {
    auto* const word = const_cast<uint32_t*>(at);
    add(stream, Kind::wait_for_host,
        [=] { return std::atomic_ref(*word).load(std::memory_order_acquire) == value; });
  }
  void copy(void* to, const void* from, size_t bytes, void* stream) override {
    add(stream, Kind::copy, [=] { return std::memcpy(to, from, bytes), true; });
  }
  void finish(void* stream) noexcept override {
    while (!queue(stream).empty())
      for (const auto& one : streams_) (void)step(one.get());
  }

  // Runs the next operation of the stream, if there is one that can start. Returns whether it did.
  bool step(void* stream) {
    Queue& of = queue(stream);
    if (of.empty() || !of.front().second()) return false;
    of.pop_front();
    return true;
  }
  // Runs operations of the stream up to the next one of this kind, and that one.
  void step_to(void* stream, Kind kind) {
    for (bool reached = false; !reached;) {
      expect(!queue(stream).empty(), "no such operation is left");
      reached = queue(stream).front().first == kind;
      expect(step(stream), "an operation cannot start");
    }
  }
  static Queue& queue(void* stream) { return *static_cast<Queue*>(stream); }
  void* last_stream() const { return streams_.back().get(); }

 private:
  struct Event {
    int recorded = 0, passed = 0;
  };
  static void add(void* stream, Kind kind, std::function<bool()> run) {
    queue(stream).emplace_back(kind, std::move(run));
  }
  std::vector<std::unique_ptr<Queue>> streams_;
  std::vector<std::unique_ptr<Event>> events_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory_;
};
using Kind = SteppedDevice::Kind;

// A transport with a test's function.
class ToldTransport final : public HostTransport {
 public:
  std::function<void(std::span<const PeerMessage>, MessageProgress&)> body;
  std::atomic<bool> aborted = false;
  void exchange(std::span<const PeerMessage> messages, std::chrono::nanoseconds,
                MessageProgress& progress) override {
    body(messages, progress);
  }
  void abort(const std::string&) noexcept override {
    aborted = true;
    aborted.notify_all();
  }
  void close() noexcept override {}
};

// A channel of a rank that sends `out` and receives `in`, of equal sizes.
struct Bench {
  explicit Bench(size_t bytes, size_t piece = kPiece)
      : piece_bytes(piece), out(bytes), in(bytes, std::byte{0xaa}) {
    for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(i * 7 + i / 251);
  }
  void exchange() {
    channel.reserve(2 * HostStagingChannel::staged_bytes(out.size()), stream);
    const std::vector<PeerMessage> messages{{1, true, out.data(), out.size()},
                                            {1, false, in.data(), in.size()}};
    channel.begin(messages, kLong);
    channel.end();
  }
  bool holds(size_t bytes) const { return std::memcmp(in.data(), out.data(), bytes) == 0; }

  size_t piece_bytes;
  std::vector<std::byte> out, in;
  std::shared_ptr<SteppedDevice> device = std::make_shared<SteppedDevice>();
  void* stream = device->make_stream();
  ToldTransport* transport = new ToldTransport;
  HostStagingChannel channel{device, stream, std::unique_ptr<HostTransport>(transport),
                             piece_bytes};
  void* copy_back_stream = device->last_stream();
};

// Receives what is sent, as soon as it is ready.
void reflect(std::span<const PeerMessage> messages, MessageProgress& progress) {
  std::mutex mutex;
  std::condition_variable changed;
  progress.set_wake([&] {
    const std::lock_guard lock(mutex);
    changed.notify_all();
  });
  for (size_t done = 0; done < messages[0].bytes;) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return progress.ready(0) > done; });
    lock.unlock();
    const size_t ready = progress.ready(0);
    std::memcpy(messages[1].data + done, messages[0].data + done, ready - done);
    progress.received(1, done = ready);
  }
  progress.set_wake({});
}

// Lets the body of a transport end, if the test has not.
struct Release {
  std::latch &first, &second;
  ~Release() {
    for (std::latch* const latch : {&first, &second})
      if (!latch->try_wait()) latch->count_down();
  }
};

const Test kOverlap("copies in both directions run during the exchange of a long message", [] {
  std::latch began(1), second_copied(1), first_received(1), copied_back(1);
  size_t at_first = 0, later = 0;
  Bench bench(4 * kPiece);
  const Release release{second_copied, copied_back};  // if an operation is missing
  SteppedDevice& device = *bench.device;
  bench.transport->body = [&](auto messages, MessageProgress& progress) {
    at_first = progress.ready(0);
    began.count_down();
    second_copied.wait();
    later = progress.ready(0);
    std::memcpy(messages[1].data, messages[0].data, kPiece);
    progress.received(1, kPiece);
    first_received.count_down();
    copied_back.wait();
    reflect(messages, progress);
  };
  bench.exchange();
  device.step_to(bench.stream, Kind::call);
  began.wait();
  device.step_to(bench.stream, Kind::call);
  second_copied.count_down();
  first_received.wait();
  while (device.step(bench.stream)) continue;  // copies the rest
  device.step_to(bench.copy_back_stream, Kind::copy);
  const bool first_is_back = bench.holds(kPiece),
             second_is_back = device.step(bench.copy_back_stream);
  copied_back.count_down();
  device.finish(bench.stream);
  expect(first_is_back && !second_is_back, "the first piece is on the device");
  expect_equal(at_first, kPiece, "bytes that are ready when the exchange begins");
  expect_equal(later, 2 * kPiece, "bytes that are ready after another copy");
  expect(bench.holds(bench.in.size()), "the message");
});

const Test kCounted(
    "of 64 copies of a long message, the exchange waits for one, and one waits for it", [] {
      constexpr size_t kBytes = size_t{64} << 20;
      constexpr int kPieces = 32;
      Bench bench(kBytes, HostStagingChannel::kPieceBytes);
      bench.transport->body = reflect;
      bench.exchange();
      const auto is = [](Kind kind) { return [=](const auto& one) { return one.first == kind; }; };
      const auto& out = SteppedDevice::queue(bench.stream);
      const auto& back = SteppedDevice::queue(bench.copy_back_stream);
      const auto first_call = std::ranges::find_if(out, is(Kind::call));
      const auto end_of_exchange =
          std::find_if(back.rbegin(), back.rend(), is(Kind::wait_for_host)).base();
      expect_equal(std::count_if(out.begin(), first_call, is(Kind::copy)), 1, "copies before it");
      expect_equal(std::count_if(end_of_exchange, back.end(), is(Kind::copy)), 1,
                   "copies after it");
      expect_equal(std::ranges::count_if(out, is(Kind::copy)), kPieces, "copies to the host");
      expect_equal(std::ranges::count_if(back, is(Kind::copy)), kPieces, "copies to the device");
      bench.device->finish(bench.stream);
      expect(bench.holds(kBytes), "the message");
    });

const Test kShort("a short message takes a copy, a call, a wait and a copy", [] {
  Bench bench(kPiece);
  bench.transport->body = reflect;
  bench.exchange();
  expect_equal(SteppedDevice::queue(bench.stream).size(), size_t{4}, "commands");
  expect(SteppedDevice::queue(bench.copy_back_stream).empty(), "one stream");
  bench.device->finish(bench.stream);
  expect(bench.holds(kPiece), "the message");
});

const Test kSent("the stream does not continue while data is sent", [] {
  std::latch received(1), sent(1);
  Bench bench(2 * kPiece);
  bench.transport->body = [&](auto, MessageProgress& progress) {
    progress.received(1, 2 * kPiece);
    received.count_down();
    sent.wait();
  };
  bench.exchange();
  while (bench.device->step(bench.stream)) continue;
  received.wait();
  while (bench.device->step(bench.copy_back_stream)) continue;
  const bool waits = !bench.device->step(bench.stream);
  sent.count_down();
  bench.device->finish(bench.stream);
  expect(waits, "the next call could overwrite what is sent");
});

const Test kSizes("messages of all sizes arrive, in at most 64 pieces", [] {
  for (const size_t bytes :
       {size_t{1}, size_t{127}, kPiece - 1, kPiece, kPiece + 1, 2 * kPiece + 129, 64 * kPiece,
        64 * kPiece + 1, 65 * kPiece + 64, 1000 * kPiece + 77}) {
    Bench bench(bytes);
    bench.transport->body = reflect;
    for (int turn = 0; turn < 2; ++turn) {
      std::memset(bench.in.data(), 0xaa, bytes);
      bench.exchange();
      const auto waits = std::ranges::count_if(
          SteppedDevice::queue(bytes > kPiece ? bench.copy_back_stream : bench.stream),
          [](const auto& one) { return one.first == Kind::wait_for_host; });
      expect(waits >= 1 && waits <= 64 && (bytes > kPiece) == (waits > 1), "pieces");
      bench.device->finish(bench.stream);
      expect(bench.holds(bytes), std::to_string(bytes) + " bytes");
    }
  }
});

const Test kAborted("an abort between two pieces lets the streams continue", [] {
  std::latch received(1), finished(1);
  int exchanges = 0;
  Bench bench(4 * kPiece);
  const Release release{received, finished};
  bench.transport->body = [&](auto, MessageProgress& progress) {
    ++exchanges;
    progress.received(1, kPiece);
    received.count_down();
    bench.transport->aborted.wait(false);
    finished.wait();
    throw GroupBroken("aborted");
  };
  bench.exchange();
  bench.device->step_to(bench.stream, Kind::call);
  received.wait();
  bench.channel.abort("enough");
  expect(bench.transport->aborted, "the running exchange is notified");
  bench.exchange();
  bench.device->finish(bench.stream);
  finished.count_down();
  expect_equal(exchanges, 1, "exchanges");
});

const Test kFailed("the error of an exchange is known when the stream continues", [] {
  Bench bench(4 * kPiece);
  bench.transport->body = [&](auto, MessageProgress& progress) {
    progress.received(1, kPiece);
    throw PeerLost("rank 1 died", {.peer = 1});
  };
  bench.exchange();
  bench.device->finish(bench.stream);
  const auto error = bench.channel.async_error();
  expect(error && error->kind() == ErrorKind::peer_lost, "the error");
  bench.transport->body = [](auto, MessageProgress&) { throw Timeout("late"); };
  bench.exchange();
  bench.device->finish(bench.stream);
  expect(bench.channel.async_error()->kind() == ErrorKind::peer_lost, "the first error stays");
});

// Either may hold an object of Python, which a thread must not destroy at the end of the process.
const Test kDetached("a wait for a detached call outlives the call and its device", [] {
  for (int i = 0; i < 1000; ++i) {
    auto device = std::make_shared<SteppedDevice>();
    auto used = std::make_shared<int>();
    const std::weak_ptr<SteppedDevice> device_left = device;
    const std::weak_ptr<int> used_left = used;
    {
      device::DetachedCalls calls(std::move(device));
      calls.start([kept = std::move(used)] {});
      expect(calls.wait(Deadline(std::chrono::seconds(60))), "the call returned");
    }
    expect(device_left.expired() && used_left.expired(), "a thread destroys it later");
  }
});

}  // namespace
