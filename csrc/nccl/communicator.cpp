#include "nccl/communicator.h"

#include <chrono>
#include <thread>
#include <utility>

namespace pycomm::nccl {
namespace {

// NCCL sends no notification, so a waiting thread polls: often at first, as enqueueing takes
// microseconds, then less often, as missing ranks may take seconds.
constexpr int kEager = 1000;
constexpr std::chrono::microseconds kPatient{200};

// The state of a communicator that was aborted: an error that NCCL does not use.
constexpr NcclResult kAborted{-1};

bool is_fine(NcclResult result) {
  return result == NcclResult::success || result == NcclResult::in_progress;
}

}  // namespace

Communicator::Communicator(NcclApi& nccl, const NcclId& id, int rank, int size)
    : nccl_(nccl), rank_(rank) {
  const NcclResult result = nccl_.comm_init_rank(comm_, size, id, rank, false);
  if (is_fine(result)) return;
  const Error error = error_of("ncclCommInitRankConfig", result);
  abort();  // NCCL may have created it before it failed
  throw Error(error);
}

void Communicator::meet(const Deadline& deadline) {
  const NcclResult result = settle(deadline);
  if (result == NcclResult::in_progress)
    throw Timeout("not all ranks joined an NCCL communicator within " +
                      std::to_string(deadline.limit_s()) + " s",
                  {.op = "nccl", .rank = rank_, .elapsed_s = deadline.elapsed_s()});
  if (result != NcclResult::success) throw error_of("ncclCommInitRankConfig", result);
}

void Communicator::launch(const Calls& calls, const Deadline& deadline) {
  NcclResult result = enqueue(calls);
  if (is_fine(result)) result = settle(deadline);
  if (result == NcclResult::in_progress)
    throw Timeout("NCCL could not enqueue a call within " + std::to_string(deadline.limit_s()) +
                      " s: a rank may be missing",
                  {.op = "nccl", .rank = rank_, .elapsed_s = deadline.elapsed_s()});
  if (result != NcclResult::success) throw error_of("ncclGroupEnd", result);
}

NcclResult Communicator::enqueue(const Calls& calls) {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return kAborted;
  NcclResult result = nccl_.group_start();
  if (result == NcclResult::success) result = calls(nccl_, comm_);
  const NcclResult ended = nccl_.group_end();  // even after a failure: the thread is in a group
  return is_fine(result) ? ended : result;
}

NcclResult Communicator::state() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return kAborted;
  NcclResult error{};
  const NcclResult asked = nccl_.comm_async_error(comm_, error);
  return asked == NcclResult::success ? error : asked;
}

NcclResult Communicator::settle(const Deadline& deadline) {
  for (int looks = 0;; ++looks) {
    const NcclResult now = state();
    if (now != NcclResult::in_progress || deadline.expired()) return now;
    if (looks < kEager)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kPatient);  // see kPatient
  }
}

Error Communicator::error_of(const std::string& function, NcclResult result) {
  const ErrorFields fields{.op = "nccl", .rank = rank_};
  if (result == kAborted) return GroupBroken("the NCCL communicator was aborted", fields);
  const std::string text = nccl_error_text(nccl_, function, result, current());
  if (result == NcclResult::remote_error) return PeerLost(text, fields);
  if (result == NcclResult::timeout) return Timeout(text, fields);
  return GroupBroken(text, fields);
}

NcclComm* Communicator::current() {
  const std::lock_guard lock(mutex_);
  return comm_;
}

NcclComm* Communicator::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(comm_, nullptr);
}

bool Communicator::close(const Deadline& deadline) noexcept {
  if (captured_) {
    (void)take();  // see keep_for_graph()
    return true;
  }
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return true;
    if (!is_fine(nccl_.comm_finalize(comm_))) return false;
  }
  if (settle(deadline) != NcclResult::success) return false;
  NcclComm* const comm = take();
  return comm == nullptr || is_fine(nccl_.comm_destroy(comm));
}

// Unlocked, because NCCL waits here: for streams that wait for other work, and for graphs.
void Communicator::abort() noexcept {
  NcclComm* const comm = take();
  if (comm != nullptr) (void)nccl_.comm_abort(comm);
}

}  // namespace pycomm::nccl
