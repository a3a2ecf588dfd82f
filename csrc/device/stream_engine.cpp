#include "device/stream_engine.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/errors.h"

namespace pycomm::device {
namespace {

// How long destruction waits for NCCL to end communicators, which usually takes milliseconds.
constexpr std::chrono::seconds kAbortTimeout{2};

// The NCCL type of a dtype. `exact` is false if that type only has the same size, which is enough
// to move elements but not to add them.
struct NcclElements {
  nccl::NcclDtype dtype;
  size_t each;  // NCCL elements per element
  bool exact;
};

NcclElements nccl_elements_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float16:
      return {nccl::NcclDtype::float16, 1, true};
    case Dtype::bfloat16:
      return {nccl::NcclDtype::bfloat16, 1, true};
    case Dtype::float32:
      return {nccl::NcclDtype::float32, 1, true};
    case Dtype::float64:
      return {nccl::NcclDtype::float64, 1, true};
    case Dtype::int8:
      return {nccl::NcclDtype::int8, 1, true};
    case Dtype::int16:
      return {nccl::NcclDtype::uint8, 2, false};
    case Dtype::int32:
      return {nccl::NcclDtype::int32, 1, true};
    case Dtype::int64:
      return {nccl::NcclDtype::int64, 1, true};
    case Dtype::uint8:
      return {nccl::NcclDtype::uint8, 1, true};
    case Dtype::boolean:
      break;
  }
  return {nccl::NcclDtype::uint8, 1, false};
}

// Of a channel: a multiple of the alignment of allocations.
size_t scratch_bytes(const StreamStages& stages, Dtype dtype) {
  constexpr size_t kAligned = 256;
  return (stages.scratch * bytes_of(dtype) + kAligned - 1) / kAligned * kAligned;
}

// The rank in the communicators, or kNoRank; an unknown rank (kNoRank) stays kNoRank.
int local_rank(int rank, std::span<const int> local_ranks) {
  return local_ranks.empty() || rank < 0 ? rank : local_ranks[static_cast<size_t>(rank)];
}

// Host memory of the stage with the most data to and from ranks outside the communicators.
size_t staged_bytes(const StreamStages& stages, Dtype dtype, std::span<const int> local_ranks) {
  size_t most = 0;
  for (const StreamStage& stage : stages.stages) {
    size_t bytes = 0;
    for (const auto* messages : {&stage.sends, &stage.receives})
      for (const auto& [peer, range] : *messages)
        if (local_rank(peer, local_ranks) == collectives::kNoRank)
          bytes += HostStagingChannel::staged_bytes(range.count * bytes_of(dtype));
    most = std::max(most, bytes);
  }
  return most;
}

std::optional<nccl::NcclOp> nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return nccl::NcclOp::sum;
    case ReduceOp::avg:
      return nccl::NcclOp::avg;
    case ReduceOp::product:
      return nccl::NcclOp::product;
    case ReduceOp::min:
      return nccl::NcclOp::min;
    case ReduceOp::max:
      return nccl::NcclOp::max;
    case ReduceOp::band:
    case ReduceOp::bor:
    case ReduceOp::bxor:
      break;
  }
  return std::nullopt;
}

void keep_forever(std::shared_ptr<void> object) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;  // never destroyed
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(object));
}

}  // namespace

bool has_nccl(Operation operation, Dtype dtype, ReduceOp op) {
  switch (operation) {
    case Operation::broadcast:
    case Operation::all_gather:
    case Operation::send:
    case Operation::recv:
      return true;
    case Operation::all_reduce:
    case Operation::reduce_scatter:
      return nccl_elements_of(dtype).exact && nccl_op(op).has_value();
    case Operation::barrier:
    case Operation::reduce:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
      break;
  }
  return false;
}

StreamEngine::StreamEngine(std::shared_ptr<nccl::NcclApi> nccl, std::shared_ptr<Device> device,
                           int rank, int size)
    : nccl_(std::move(nccl)),
      device_(std::move(device)),
      rank_(rank),
      size_(size),
      events_(std::make_shared<EventPool>(device_)),
      scratch_(std::make_unique<GrowableBuffer>(device_, GrowableBuffer::Where::device)),
      ends_(device_) {
  channels_.push_back(std::make_unique<Channel>(device_));
}

// Aborts first, because destroying a stream and releasing memory wait for the device. If NCCL does
// not end, its work does not either, and what that uses is kept until the process ends.
StreamEngine::~StreamEngine() {
  end_communicators(&nccl::Communicator::abort);
  if (ends_.wait(Deadline(kAbortTimeout))) return;
  for (auto& channel : channels_) keep_forever(std::move(channel));
  keep_forever(std::move(scratch_));
}

// On other threads, as NCCL may wait there.
void StreamEngine::end_communicators(void (nccl::Communicator::*end)() noexcept) noexcept {
  for (const auto& channel : channels_)
    if (channel->communicator)
      ends_.start([nccl = nccl_, one = channel->communicator, end] { (one.get()->*end)(); });
}

void StreamEngine::connect(std::span<const nccl::NcclId> ids, RemoteRanks remote,
                           const Deadline& deadline) {
  if (size_ == 1) return;
  local_ranks_ = std::move(remote.local_ranks);
  const auto together =
      local_ranks_.empty()
          ? size_
          : size_ - static_cast<int>(std::ranges::count(local_ranks_, collectives::kNoRank));
  while (channels_.size() < ids.size()) channels_.push_back(std::make_unique<Channel>(device_));
  // Calls of all channels must fit on the device together. A call whose blocks wait for those of
  // another channel could otherwise wait for a peer that has them in the opposite order.
  const int max_ctas =
      ids.size() > 1 ? std::max(1, device_->multiprocessors() / static_cast<int>(ids.size())) : 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    Channel& channel = *channels_[i];
    if (!local_ranks_.empty())
      channel.staging = std::make_unique<HostStagingChannel>(device_, channel.stream.raw(),
                                                             std::move(remote.transports.at(i)));
    if (together == 1) continue;
    device_->while_current([&] {
      channel.communicator = std::make_shared<nccl::Communicator>(
          *nccl_, ids[i], local_rank(rank_, local_ranks_), together, max_ctas);
      channel.communicator->connect(deadline);
    });
  }
}

std::vector<nccl::Communicator*> StreamEngine::communicators() {
  std::vector<nccl::Communicator*> all;
  for (const auto& channel : channels_)
    if (channel->communicator) all.push_back(channel->communicator.get());
  return all;
}

std::optional<Error> StreamEngine::async_error() {
  for (const auto& channel : channels_)
    if (channel->staging)
      if (auto error = channel->staging->async_error()) return error;
  return std::nullopt;
}

void StreamEngine::abort(const std::string& reason) noexcept {
  for (const auto& channel : channels_)
    if (channel->staging) channel->staging->abort(reason);
  end_communicators(&nccl::Communicator::abort);
}

void StreamEngine::close(const Deadline& deadline) noexcept {
  for (const auto& channel : channels_)
    if (channel->staging) channel->staging->close();
  end_communicators(&nccl::Communicator::close);
  (void)ends_.wait(deadline);
}

void StreamEngine::prepare(const StreamJob& job, void* caller) {
  if (job.plan == nullptr) return;
  size_t bytes = 0;
  for (const StreamStages& stages : *job.plan) bytes += scratch_bytes(stages, job.dtype);
  scratch_->reserve(bytes, caller);
  for (size_t i = 0; i < job.plan->size(); ++i)
    if (channels_.at(i)->staging)
      channels_[i]->staging->reserve(staged_bytes((*job.plan)[i], job.dtype, local_ranks_), caller);
}

void StreamEngine::prepare(std::span<const PeerMessage> messages, void* caller) {
  size_t bytes = 0;
  for (const PeerMessage& one : messages)
    if (local_rank(one.peer, local_ranks_) == collectives::kNoRank)
      bytes += HostStagingChannel::staged_bytes(one.bytes);
  if (channels_[0]->staging) channels_[0]->staging->reserve(bytes, caller);  // also for any source
}

bool StreamEngine::is_connected(int peer, bool sends) const {
  return local_rank(peer, local_ranks_) == collectives::kNoRank ||
         channels_[0]->connected.contains({peer, sends});
}

// Enqueues what `body` enqueues on the stream of the first channel.
template <typename Body>
std::shared_ptr<Event> StreamEngine::enqueue_between(Event& before, const Body& body) {
  auto end_event = event();
  void* const stream = channels_[0]->stream.raw();
  // NCCL sets the device of a communicator and then the thread's own again.
  device_->while_current([&] {
    before.stream_wait(stream);
    const bool captured = device_->capturing(stream);
    for (nccl::Communicator* const communicator : communicators())
      if (captured) communicator->keep_for_graph();
    body();
    end_event->record(stream);
  });
  return end_event;
}

std::shared_ptr<Event> StreamEngine::enqueue(const StreamJob& job, Event& before) {
  return enqueue_between(before, [&] {
    job.plan != nullptr ? run(job) : run_nccl(job);
    if (!job.gate) return;
    channels_[0]->gate = job.gate;  // as long as the stream
    job.gate->wait(channels_[0]->stream.raw());
  });
}

std::shared_ptr<Event> StreamEngine::enqueue(std::span<const PeerMessage> messages,
                                             std::chrono::nanoseconds timeout, Event& before) {
  return enqueue_between(before, [&] { exchange(*channels_[0], messages, timeout); });
}

// Channels start after the work on the first one, with which they share scratch; the first one
// continues after all of them. All stages of a channel are enqueued before the next channel, so all
// ranks launch in the same order, as NCCL requires for communicators on one device.
void StreamEngine::run(const StreamJob& job) {
  std::byte* scratch = scratch_->data();
  void* const first = channels_[0]->stream.raw();
  const size_t count = job.plan->size();
  std::shared_ptr<Event> begin;
  if (count > 1) {
    begin = event();
    begin->record(first);
  }
  for (size_t i = 0; i < count; ++i) {
    const StreamStages& stages = (*job.plan)[i];
    Channel& channel = *channels_.at(i);
    if (i > 0) begin->stream_wait(channel.stream.raw());
    for (const StreamStage& stage : stages.stages) run_stage({job, channel, scratch}, stage);
    scratch += scratch_bytes(stages, job.dtype);
  }
  for (size_t i = 1; i < count; ++i) {
    const auto end = event();
    end->record(channels_[i]->stream.raw());
    end->stream_wait(first);
  }
}

void StreamEngine::run_stage(const ChannelJob& channel_job, const StreamStage& stage) {
  std::vector<PeerMessage> messages;
  const auto add = [&](const std::vector<StreamStage::Message>& of_stage, bool sends) {
    for (const auto& [peer, range] : of_stage)
      messages.push_back(
          {peer, sends, place(channel_job, range), range.count * bytes_of(channel_job.job.dtype)});
  };
  add(stage.sends, true);
  add(stage.receives, false);
  exchange(channel_job.channel, messages, channel_job.job.timeout);
  for (const StreamStage::Step& step : stage.steps) run_step(channel_job, step);
}

// Messages between hosts start first, and NCCL's messages run concurrently.
void StreamEngine::exchange(Channel& channel, std::span<const PeerMessage> messages,
                            std::chrono::nanoseconds timeout) {
  std::vector<PeerMessage> local, remote;
  for (const PeerMessage& one : messages) {
    (local_rank(one.peer, local_ranks_) == collectives::kNoRank ? remote : local).push_back(one);
    if (one.sends) traffic_.bytes_sent += one.bytes;
  }
  if (!remote.empty()) {
    channel.staging->begin(remote, timeout);
    ++traffic_.groups;
  }
  if (!local.empty()) launch(channel, local);
  if (!remote.empty()) channel.staging->end();
}

// As bytes, which NCCL sends whatever the dtype.
void StreamEngine::launch(Channel& channel, std::span<const PeerMessage> messages) {
  const auto calls = [&](nccl::NcclApi& nccl, nccl::NcclComm* comm) {
    const nccl::NcclQueue queue{comm, channel.stream.raw()};
    nccl::NcclResult result = nccl::NcclResult::success;
    for (const auto& [peer, sends, data, bytes] : messages) {
      const int other = local_rank(peer, local_ranks_);
      const nccl::NcclResult one =
          sends ? nccl.send({data, nullptr, bytes, nccl::NcclDtype::uint8}, other, queue)
                : nccl.recv({nullptr, data, bytes, nccl::NcclDtype::uint8}, other, queue);
      if (result == nccl::NcclResult::success || result == nccl::NcclResult::in_progress)
        result = one;
    }
    return result;
  };
  channel.communicator->launch(calls);
  for (const PeerMessage& one : messages) channel.connected.emplace(one.peer, one.sends);
  ++traffic_.groups;
}

void StreamEngine::run_step(const ChannelJob& channel_job, const StreamStage::Step& step) {
  const size_t bytes = step.in.count * bytes_of(channel_job.job.dtype);
  void* const stream = channel_job.channel.stream.raw();
  std::byte* into = place(channel_job, step.in);
  switch (step.combine) {
    case collectives::Combine::copy:
      if (step.arrived.count == 0)
        device_->clear(into, bytes, stream);
      else if (const std::byte* from = place(channel_job, step.arrived); from != into)
        device_->copy(into, from, bytes, stream);
      return;
    case collectives::Combine::reduce:
    case collectives::Combine::finish:
    case collectives::Combine::fold:
      return reduce(channel_job, step);
  }
}

// avg adds; the last addition of an element divides.
void StreamEngine::reduce(const ChannelJob& channel_job, const StreamStage::Step& step) {
  const StreamJob& job = channel_job.job;
  const size_t bytes = step.in.count * bytes_of(job.dtype);
  const bool partial = step.combine == collectives::Combine::reduce && job.op == ReduceOp::avg;
  const std::byte* arrived = place(channel_job, step.arrived);
  std::vector<const void*> inputs;
  if (step.combine == collectives::Combine::fold) {
    const size_t slots = step.arrived.count / step.in.count;
    for (size_t slot = 0; slot < slots; ++slot) inputs.push_back(arrived + slot * bytes);
  } else {
    inputs = {place(channel_job, step.with), arrived};
  }
  device_->reduce({.out = place(channel_job, step.in),
                   .inputs = inputs,
                   .count = step.in.count,
                   .dtype = job.dtype,
                   .op = partial ? ReduceOp::sum : job.op,
                   .size = size_},
                  channel_job.channel.stream.raw());
  ++traffic_.kernels;
}

void StreamEngine::run_nccl(const StreamJob& job) {
  const auto [dtype, each, exact] = nccl_elements_of(job.dtype);
  const nccl::NcclData data{job.input, job.output, job.count * each, dtype};
  const auto calls = [&](nccl::NcclApi& nccl, nccl::NcclComm* comm) {
    const nccl::NcclQueue queue{comm, channels_[0]->stream.raw()};
    if (job.operation == Operation::broadcast)
      return nccl.broadcast({job.output, data.out, data.count, data.dtype}, job.peer, queue);
    if (job.operation == Operation::all_gather) return nccl.all_gather(data, queue);
    if (job.operation == Operation::all_reduce)
      return nccl.all_reduce(data, nccl_op(job.op).value(), queue);
    return nccl.reduce_scatter(data, nccl_op(job.op).value(), queue);
  };
  channels_[0]->communicator->launch(calls);
  ++traffic_.groups;
}

std::byte* StreamEngine::place(const ChannelJob& channel_job, const collectives::Range& range) {
  const size_t begin = range.begin * bytes_of(channel_job.job.dtype);
  switch (range.space) {
    case collectives::Space::input:
      return const_cast<std::byte*>(channel_job.job.input) + begin;
    case collectives::Space::output:
      return channel_job.job.output + begin;
    case collectives::Space::scratch:
      break;
  }
  return channel_job.scratch + begin;
}

}  // namespace pycomm::device
