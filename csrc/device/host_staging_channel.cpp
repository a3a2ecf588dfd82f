#include "device/host_staging_channel.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace pycomm::device {
namespace {

constexpr size_t kAligned = 128;

size_t quotient(size_t a, size_t b) { return (a + b - 1) / b; }  // rounded up
size_t aligned(size_t bytes) { return quotient(bytes, kAligned) * kAligned; }

}  // namespace

// Messages in host memory, and how far they are. A graph uses it in each of its runs.
class HostStagingChannel::Exchange final : public MessageProgress {
 public:
  explicit Exchange(HostCallbackThread& callbacks) : callbacks_(callbacks) {}

  // Before begin(). `on_device`: the message's array; its pieces are `piece_bytes` long.
  void add(const PeerMessage& staged, std::byte* on_device, size_t piece_bytes) {
    const size_t most =
        std::clamp<size_t>(quotient(staged.bytes, piece_bytes), 1, HostCallbackThread::kSteps);
    const size_t piece = std::max(aligned(quotient(staged.bytes, most)), kAligned);
    messages_.push_back(staged);
    arrays_.push_back({on_device, piece});
    size_t& steps = staged.sends ? steps_out_ : steps_back_;
    steps = std::max(steps, quotient(staged.bytes, piece));
  }
  std::span<const PeerMessage> messages() const { return messages_; }
  size_t steps(bool sends) const { return sends ? steps_out_ : steps_back_; }
  // Passes (array on the device, host memory, bytes) of each piece of a step to `copy`.
  template <typename Copy>
  void each_piece(bool sends, size_t step, const Copy& copy) const {
    for (size_t i = 0; i < messages_.size(); ++i) {
      const size_t begin = end_of(i, step), bytes = end_of(i, step + 1) - begin;
      if (messages_[i].sends == sends && bytes > 0)
        copy(arrays_[i].data + begin, messages_[i].data + begin, bytes);
    }
  }

  // On the callback thread, around an exchange.
  void start() {
    arrived_.assign(messages_.size(), 0);
    completed_ = 0;
  }
  void end() { copied_ = 1; }
  // On a CUDA thread: the pieces of these steps are in host memory.
  void set_copied(size_t steps) {
    copied_ = steps;
    wake();
  }

  size_t ready(size_t index) const override { return end_of(index, copied_); }
  // The end of the exchange completes the last step: the next one overwrites sent data.
  void received(size_t index, size_t bytes) override {
    arrived_[index] = bytes;
    for (; completed_ + 1 < steps_back_ && has_arrived(completed_); ++completed_)
      callbacks_.complete(completed_);
  }

 private:
  struct Array {
    std::byte* data;
    size_t piece_bytes;
  };
  size_t end_of(size_t index, size_t steps) const {
    return std::min(messages_[index].bytes, steps * arrays_[index].piece_bytes);
  }
  bool has_arrived(size_t step) const {
    for (size_t i = 0; i < messages_.size(); ++i)
      if (!messages_[i].sends && arrived_[i] < end_of(i, step + 1)) return false;
    return true;
  }

  HostCallbackThread& callbacks_;
  std::vector<PeerMessage> messages_;
  std::vector<Array> arrays_;  // of each message
  size_t steps_out_ = 1, steps_back_ = 1;
  // The first step is copied before the exchange starts.
  std::atomic<size_t> copied_{1};
  std::vector<size_t> arrived_;  // bytes of each message
  size_t completed_ = 0;         // steps
};

HostStagingChannel::HostStagingChannel(std::shared_ptr<Device> device, void* stream,
                                       std::unique_ptr<HostTransport> transport, size_t piece_bytes)
    : device_(std::move(device)),
      stream_(stream),
      transport_(std::move(transport)),
      piece_bytes_(piece_bytes),
      staging_(device_, GrowableBuffer::Where::host),
      copy_back_stream_(device_),
      first_piece_(device_),
      copied_back_(device_),
      callbacks_(device_, stream_) {}

HostStagingChannel::~HostStagingChannel() {
  if (callbacks_.stop()) transport_->abort("the device group was destroyed during the call");
  device_->finish(copy_back_stream_.raw());
}

size_t HostStagingChannel::staged_bytes(size_t bytes) { return aligned(bytes); }

// The stages of a stream run one after another, so each may use all of the memory.
void HostStagingChannel::begin(std::span<const PeerMessage> messages,
                               std::chrono::nanoseconds timeout) {
  current_ = std::make_shared<Exchange>(callbacks_);
  std::byte* free = staging_.data();
  for (PeerMessage staged : messages) {
    std::byte* const array = std::exchange(staged.data, free);
    free += staged_bytes(staged.bytes);
    current_->add(staged, array, piece_bytes_);
  }
  const auto body = [this, exchange = current_, timeout] {
    exchange->start();
    run([&] { transport_->exchange(exchange->messages(), timeout, *exchange); });
    exchange->end();
  };
  const bool captured = device_->capturing(stream_);
  for (size_t step = 0; step < current_->steps(true); ++step) {
    current_->each_piece(true, step, [&](const std::byte* array, std::byte* host, size_t bytes) {
      device_->copy(host, array, bytes, stream_);
    });
    if (step > 0) {
      callbacks_.notify([exchange = current_, step] { exchange->set_copied(step + 1); }, captured);
      continue;
    }
    callbacks_.begin(body, captured);
    if (current_->steps(false) > 1) first_piece_.record(stream_);
  }
}

void HostStagingChannel::begin(std::function<void()> body) {
  current_ = nullptr;
  callbacks_.begin([this, body = std::move(body)] { run(body); }, device_->capturing(stream_));
}

// Long messages are copied back on a stream of their own, beside what the caller enqueued.
void HostStagingChannel::end() {
  const std::shared_ptr<Exchange> exchange = std::exchange(current_, nullptr);
  if (!exchange) return callbacks_.stream_wait(stream_, 0);
  const size_t steps = exchange->steps(false);
  void* const stream = steps > 1 ? copy_back_stream_.raw() : stream_;
  if (steps > 1) first_piece_.stream_wait(stream);
  for (size_t step = 0; step < steps; ++step) {
    callbacks_.stream_wait(stream, step);
    exchange->each_piece(false, step, [&](std::byte* array, const std::byte* host, size_t bytes) {
      device_->copy(array, host, bytes, stream);
    });
  }
  if (steps == 1) return;
  copied_back_.record(stream);
  copied_back_.stream_wait(stream_);
}

// Runs on the callback thread.
void HostStagingChannel::run(const std::function<void()>& body) noexcept {
  std::optional<Error> error;
  try {
    body();
    return;
  } catch (const Error& thrown) {
    error = thrown;
  } catch (const std::exception& thrown) {  // e.g. std::bad_alloc
    error = InternalError(thrown.what());
  }
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

std::optional<Error> HostStagingChannel::async_error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void HostStagingChannel::abort(const std::string& reason) noexcept {
  (void)callbacks_.stop();
  transport_->abort(reason);
}

}  // namespace pycomm::device
