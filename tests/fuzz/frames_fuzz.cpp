// Bytes of a rank on an established connection: an engine makes calls while its peer sends
// arbitrary bytes, split anywhere, and then closes.
//
// The first byte of the input selects the call, the second the size of each chunk; the rest is
// sent.
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/operation.h"
#include "engine/engine.h"
#include "fuzz.h"
#include "played_channels.h"

namespace {

using namespace pycomm;
using namespace std::chrono_literals;

constexpr size_t kCount = 40;
constexpr int kCalls = 3;  // a group continues after a disagreement

// Gives what is on the tape, `grain` bytes at a time.
class Tape final : public played::PlayedChannel {
 public:
  Tape(fuzz::Input tape, size_t grain) : tape_(tape), grain_(grain), awake_(::eventfd(1, 0)) {}

  ConstBytes peek(size_t want) override { return tape_.first(std::min({want, tape_.size()})); }
  void take(size_t bytes) override { tape_ = tape_.subspan(bytes); }
  size_t receive(Bytes into) override {
    const size_t n = std::min({into.size(), tape_.size(), grain_});
    if (n > 0) std::memcpy(into.data(), tape_.data(), n);
    take(n);
    return n;
  }
  bool is_closed() const override { return closed_; }
  pollfd arm(transport::Want) override { return {awake_.get(), POLLIN, 0}; }
  void disarm(short revents) override { closed_ |= revents != 0; }
  void close(ConstBytes) override { closed_ = true; }

 private:
  fuzz::Input tape_;
  size_t grain_;
  os::Fd awake_;
  bool closed_ = false;
};

// Received bytes may be unaligned: floats must not be read in place.
void add(void* out, const void* a, const void* b, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float one, other;
    std::memcpy(&one, static_cast<const std::byte*>(a) + i * sizeof one, sizeof one);
    std::memcpy(&other, static_cast<const std::byte*>(b) + i * sizeof other, sizeof other);
    one += other;
    std::memcpy(static_cast<std::byte*>(out) + i * sizeof one, &one, sizeof one);
  }
}
constexpr kernels::Reducer kAdd{add, nullptr, nullptr, nullptr};

// One exchange with the other rank, of which the half is added and the half copied.
engine::Schedule exchange() {
  const collectives::Range first{collectives::Space::output, 0, kCount / 2},
      second{collectives::Space::output, kCount / 2, kCount / 2};
  collectives::Plan plan;
  plan.scratch = kCount / 2;
  plan.moves = {{1,
                 first,
                 1,
                 {collectives::Space::scratch, 0, kCount / 2},
                 collectives::Combine::reduce,
                 first},
                {1, second, 1, second, collectives::Combine::copy, {}}};
  return engine::make_schedule(std::move(plan), 0);
}

void call(engine::Engine& engine, int what) {
  const Deadline deadline(2ms);  // of what the other may keep this rank waiting with
  std::vector<float> array(kCount, 1);
  transport::Header signature;
  signature.dtype = static_cast<uint8_t>(Dtype::float32);
  signature.count = kCount;
  const transport::Bytes bytes = std::as_writable_bytes(std::span(array));
  if (what == 0) {
    signature.operation = static_cast<uint8_t>(Operation::all_reduce);
    const engine::Schedule schedule = exchange();
    engine::Job job{.header = engine.next_header(signature), .schedule = &schedule};
    job.input = job.output = bytes.data();
    job.element_bytes = sizeof(float);
    job.reducer = &kAdd;
    job.size = 2;
    engine::PlanTask task = engine.plan_task(job);
    return engine.run(task, job.header, deadline);
  }
  signature.operation = static_cast<uint8_t>(Operation::send);
  signature.peer = 7;
  if (what == 1) return engine.messenger().send(1, signature, bytes, deadline);
  if (what < 4) {
    (void)engine.messenger().receive(what == 2 ? 1 : engine::kAnyPeer, signature, bytes, deadline);
    return;
  }
  signature.algorithm = transport::kOnDevice;
  if (what == 4) return engine.messenger().announce_send(1, signature, deadline);
  (void)engine.messenger().receive(1, signature, {}, deadline);
}

}  // namespace

void fuzz::one(Input input) {
  if (input.size() < 2) return;
  const int what = std::to_integer<int>(input[0]) % 6;
  const size_t grain = 1 + std::to_integer<size_t>(input[1]);
  std::vector<std::unique_ptr<transport::Channel>> channels(2);
  channels[1] = std::make_unique<Tape>(input.subspan(2), grain);
  engine::EngineOptions options;
  options.names = {"rank 0", "rank 1"};
  engine::Engine engine(std::move(channels), options);
  for (int i = 0; i < kCalls; ++i) {
    try {
      call(engine, what);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::internal) std::fprintf(stderr, "%s\n", error.what());
      demand(error.kind() != ErrorKind::internal,
             "another rank's bytes are reported as an internal error");
      if (error.kind() != ErrorKind::mismatch) break;
    }
  }
  (void)engine.heartbeat();
  (void)engine.status();
}
