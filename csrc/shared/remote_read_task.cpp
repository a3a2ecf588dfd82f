#include "shared/remote_read_task.h"

#include <algorithm>
#include <utility>

#include "collectives/plan.h"
#include "cpu/copy.h"
#include "os/process_memory.h"
#include "shared/sum.h"

namespace pycomm::shared {
namespace {

// Bytes per read: few system calls, and the data is still in the L2 cache when it is added.
constexpr size_t kStepBytes = size_t{256} << 10;

}  // namespace

RemoteReadTask::RemoteReadTask(engine::Engine& engine, SharedMemoryRegion& region,
                               const SharedJob& job, const transport::Header& header,
                               std::vector<RemoteBuffer> buffers)
    : FlagTask(engine, region, header, 1), job_(job), buffers_(std::move(buffers)) {
  if (job.operation == Operation::reduce_scatter) end_ = job.count;
  if (job.operation != Operation::all_reduce) return;
  const collectives::Range mine =
      collectives::piece(collectives::Space::output, job.count, size_, rank_);
  begin_ = at_ = mine.begin;
  end_ = mine.begin + mine.count;
}

bool RemoteReadTask::advance() {
  awaited_ = collectives::kNoRank;
  if (at_ < end_) return sum_more();
  if (!published_) {
    publish(region_.own().reduced[first_ % kSlots].flag, first_ + 1);
    return published_ = true;
  }
  if (turn_ < size_) return collect_more();
  if (!shown_) {
    if (!all_in_call()) return false;  // a peer that left may have overwritten its array
    copy_own_row();
    count();
    publish(region_.own().done, first_ + 1);
    return shown_ = true;
  }
  return ended_ = have_all_read();
}

// Sums this rank's piece of all ranks. The peers' pieces are first read into scratch, side by side.
bool RemoteReadTask::sum_more() {
  const size_t element = job_.element_bytes, others = static_cast<size_t>(size_ - 1);
  const size_t n = std::min(end_ - at_, std::max<size_t>(1, kStepBytes / others / element));
  const size_t row = job_.operation == Operation::reduce_scatter ? job_.count : 0;
  const auto offset = [&](int rank) {  // of this step, in inputs
    return (row * static_cast<size_t>(rank) + at_) * element;
  };
  std::byte* const scratch = engine_.scratch(n * element * others).data();
  const auto place = [&](int rank) {
    const int before = rank < rank_ ? rank : rank - 1;
    return scratch + static_cast<size_t>(before) * n * element;
  };
  for (int turn = 1; turn < size_; ++turn)
    if (!read_from(peer(turn), of(peer(turn)).input_at + offset(rank_), place(peer(turn)),
                   n * element))
      return false;
  add_up(
      job_, size_, job_.output + at_ * element, n,
      [&](int rank) { return rank == rank_ ? job_.input + offset(rank_) : place(rank); },
      [](size_t, size_t) {});
  at_ += n;
  return true;
}

RemoteReadTask::Take RemoteReadTask::take_from(int peer) const {
  const size_t element = job_.element_bytes, whole = job_.count * element;
  switch (job_.operation) {
    case Operation::all_reduce: {
      const collectives::Range part =
          collectives::piece(collectives::Space::output, job_.count, size_, peer);
      const size_t begin = part.begin * element;
      return {of(peer).output_at + begin, job_.output + begin, part.count * element};
    }
    case Operation::broadcast:
      if (peer != job_.root) return {};
      return {of(peer).output_at, job_.output, whole};
    case Operation::all_gather:
      return {of(peer).input_at, job_.output + static_cast<size_t>(peer) * whole, whole};
    case Operation::reduce_scatter:
    case Operation::reduce:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return {};
}

bool RemoteReadTask::collect_more() {
  const int from = peer(turn_);
  const Take take = take_from(from);
  if (taken_ < take.bytes) {
    const bool summed = job_.operation == Operation::all_reduce;
    if (summed && is_missing(from, region_.of(from).reduced[first_ % kSlots].flag, first_ + 1))
      return false;
    const size_t n = std::min(take.bytes - taken_, kStepBytes);
    if (!read_from(from, take.from + taken_, take.into + taken_, n)) return false;
    taken_ += n;
  }
  if (taken_ == take.bytes) {
    ++turn_;
    taken_ = 0;
  }
  return true;
}

void RemoteReadTask::copy_own_row() {
  if (job_.operation != Operation::all_gather) return;
  const size_t bytes = job_.count * job_.element_bytes;
  cpu::copy(job_.output + static_cast<size_t>(rank_) * bytes, job_.input, bytes);
}

// Until all ranks have read, peers may still read this rank's arrays.
bool RemoteReadTask::have_all_read() {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_ && is_missing(peer, region_.of(peer).done, first_ + 1)) return false;
  return true;
}

// Counts the data that peers read from this rank as sent.
void RemoteReadTask::count() {
  const size_t whole = job_.count * job_.element_bytes;
  if (job_.operation == Operation::reduce_scatter)
    region_.bytes_sent += whole * static_cast<size_t>(size_ - 1);
  else if (job_.operation != Operation::broadcast || rank_ == job_.root)
    region_.bytes_sent += whole;
}

// A peer that cannot be read died or aborted, because its arrays were readable during the buffer
// exchange. The engine detects which.
bool RemoteReadTask::read_from(int peer, uint64_t from, std::byte* into, size_t bytes) {
  if (!os::read_process(of(peer).process, from, into, bytes)) {
    awaited_ = peer;
    return false;
  }
  region_.bytes_received += bytes;
  return true;
}

}  // namespace pycomm::shared
