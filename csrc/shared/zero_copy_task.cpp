#include "shared/zero_copy_task.h"

#include <algorithm>
#include <utility>

#include "collectives/plan.h"
#include "shared/sum.h"

namespace pycomm::shared {
namespace {

// Bytes per step. The engine checks for failures every 1,024 steps: some 50 ms.
constexpr size_t kStepBytes = size_t{256} << 10;

// Of a rank's arrays; 0 for sums.
size_t bytes_moved(const engine::Job& job, int size) {
  const size_t bytes = job.count * job.element_bytes;
  if (job.operation == Operation::broadcast) return bytes;
  return job.operation == Operation::all_gather ? bytes * static_cast<size_t>(size + 1) : 0;
}

bool has_pieces(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::broadcast;
}

}  // namespace

ZeroCopyTask::ZeroCopyTask(engine::Engine& engine, SharedMemoryRegion& region,
                           const engine::Job& job, std::vector<RemoteBuffer> buffers)
    : FlagTask(engine, region, job, 1),
      buffers_(std::move(buffers)),
      end_(job.count),
      to_output_(bytes_moved(job, size_)) {
  if (!has_pieces(job.operation)) return;
  const collectives::Range mine =
      collectives::piece(collectives::Space::output, job.count, size_, rank_);
  at_ = mine.begin;
  end_ = mine.begin + mine.count;
}

bool ZeroCopyTask::advance() {
  awaited_ = collectives::kNoRank;
  if (at_ < end_) {
    if (!all_in_call()) return false;
    work_more();
    return true;
  }
  if (!published_) {
    if (!all_in_call()) return false;  // a peer that left may have overwritten its array
    publish(region_.own().reduced[first_ % kSlots].flag, first_ + 1);
    published_ = true;
    return true;
  }
  if (!have_reduced(first_)) return false;
  publish(region_.own().done, first_ + 1);
  ended_ = true;
  return true;
}

void ZeroCopyTask::work_more() {
  const size_t element = job_.element_bytes;
  const size_t count = std::min(end_ - at_, kStepBytes / element);
  if (job_.operation == Operation::broadcast)
    copy_to_outputs(of(job_.root).output, at_ * element, count * element, job_.root);
  else if (job_.operation == Operation::all_gather)
    gather(at_ * element, count * element);
  else
    add_up_piece(at_ * element, count);
  to_output_.end();
  at_ += count;
}

// For all_reduce and reduce_scatter. In reduce_scatter only this rank needs its row of the inputs.
void ZeroCopyTask::add_up_piece(size_t begin, size_t count) {
  const bool for_all = job_.operation == Operation::all_reduce;
  const size_t row = for_all ? 0 : static_cast<size_t>(rank_) * job_.count * job_.element_bytes;
  add_up(
      job_, size_, job_.output + begin, count,
      [&](int rank) { return of(rank).input + row + begin; },
      [&](size_t offset, size_t bytes) {
        if (for_all) copy_to_outputs(job_.output, begin + offset, bytes, rank_);
      });
  region_.bytes_received += static_cast<uint64_t>(size_ - 1) * count * job_.element_bytes;
}

// Copies from the array of `owner` at `from` into the outputs of all others.
void ZeroCopyTask::copy_to_outputs(const std::byte* from, size_t begin, size_t bytes, int owner) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == owner) continue;
    to_output_(of(peer).output + begin, from + begin, bytes);
    if (peer != rank_) region_.bytes_sent += bytes;
  }
  if (owner != rank_) region_.bytes_received += bytes;
}

void ZeroCopyTask::gather(size_t begin, size_t bytes) {
  for (int peer = 0; peer < size_; ++peer) {
    const size_t row = static_cast<size_t>(peer) * job_.count * job_.element_bytes;
    to_output_(job_.output + row + begin, of(peer).input + begin, bytes);
    if (peer != rank_) region_.bytes_received += bytes;
  }
}

}  // namespace pycomm::shared
