#include "nccl/communicator.h"

#include <chrono>
#include <thread>
#include <utility>

namespace pycomm::nccl {
namespace {

// NCCL sends no notification, so connect() polls until all ranks have joined.
constexpr std::chrono::microseconds kPoll{200};

// The state of a communicator that was ended: an error that NCCL does not use.
constexpr NcclResult kAborted{-1};

bool is_fine(NcclResult result) {
  return result == NcclResult::success || result == NcclResult::in_progress;
}

}  // namespace

Communicator::Communicator(NcclApi& nccl, const NcclId& id, int rank, int size, int max_ctas)
    : nccl_(nccl), rank_(rank), max_ctas_(max_ctas) {
  const NcclOptions options{.blocking = false, .max_ctas = max_ctas};
  const NcclResult result = nccl_.comm_init_rank(parent_, size, id, rank, options);
  if (is_fine(result)) return;
  const Error error = error_of("ncclCommInitRankConfig", result);
  abort();  // NCCL may have created it before it failed
  throw Error(error);
}

void Communicator::connect(const Deadline& deadline) {
  wait_until_ready("ncclCommInitRankConfig", deadline);
  NcclResult result = kAborted;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) result = nccl_.comm_split(parent_, rank_, child_, {.max_ctas = max_ctas_});
  }
  if (!is_fine(result)) throw error_of("ncclCommSplit", result);
  wait_until_ready("ncclCommSplit", deadline);
}

// Waits until the parent is no longer in progress.
void Communicator::wait_until_ready(const std::string& function, const Deadline& deadline) {
  for (;;) {
    NcclResult result = kAborted;
    {
      const std::lock_guard lock(mutex_);
      NcclResult state{};
      if (!ended_) result = nccl_.comm_async_error(parent_, state);
      if (result == NcclResult::success) result = state;
    }
    if (result == NcclResult::success) return;
    if (result != NcclResult::in_progress) throw error_of(function, result);
    if (deadline.expired())
      throw Timeout("not all ranks joined an NCCL communicator within " +
                        std::to_string(deadline.limit_s()) + " s",
                    {.op = "nccl", .rank = rank_, .elapsed_s = deadline.elapsed_s()});
    std::this_thread::sleep_for(kPoll);  // see kPoll
  }
}

// Null after abort() or close(). Otherwise end_call() must follow, until which the child lives.
NcclComm* Communicator::begin_call() {
  const std::lock_guard lock(mutex_);
  if (ended_) return nullptr;
  ++calls_;
  return child_;
}

void Communicator::end_call() {
  const std::lock_guard lock(mutex_);
  --calls_;
  returned_.notify_all();
}

void Communicator::launch(const Calls& calls) {
  NcclComm* const comm = begin_call();
  if (comm == nullptr) throw error_of("ncclGroupEnd", kAborted);
  NcclResult result = nccl_.group_start();
  if (result == NcclResult::success) result = calls(nccl_, comm);
  const NcclResult ended = nccl_.group_end();  // even after a failure: the thread is in a group
  if (result == NcclResult::success) result = ended;
  end_call();
  const std::lock_guard lock(mutex_);
  if (ended_) result = kAborted;
  if (result != NcclResult::success) throw error_of("ncclGroupEnd", result);
}

NcclResult Communicator::state() {
  NcclComm* const comm = begin_call();
  if (comm == nullptr) return kAborted;
  NcclResult error{};
  const NcclResult asked = nccl_.comm_async_error(comm, error);
  end_call();
  return asked == NcclResult::success ? error : asked;
}

Error Communicator::error_of(const std::string& function, NcclResult result) {
  const ErrorFields fields{.op = "nccl", .rank = rank_};
  if (result == kAborted) return GroupBroken("the NCCL communicator was aborted", fields);
  const std::string text = nccl_error_text(nccl_, function, result);
  if (result == NcclResult::remote_error) return PeerLost(text, fields);
  if (result == NcclResult::timeout) return Timeout(text, fields);
  return GroupBroken(text, fields);
}

// Unlocked in NCCL, which waits there: for streams that wait for other work, and for graphs.
void Communicator::close() noexcept {
  std::unique_lock lock(mutex_);
  if (std::exchange(ended_, true) || captured_) return;  // see keep_for_graph()
  returned_.wait(lock, [this] { return calls_ == 0; });
  lock.unlock();
  if (child_ != nullptr) (void)nccl_.comm_destroy(child_);
  (void)nccl_.comm_destroy(parent_);
}

void Communicator::abort() noexcept {
  std::unique_lock lock(mutex_);
  if (std::exchange(ended_, true) || parent_ == nullptr) return;
  lock.unlock();
  (void)nccl_.comm_abort(parent_);
  lock.lock();
  returned_.wait(lock, [this] { return calls_ == 0; });
  lock.unlock();
  if (child_ != nullptr) (void)nccl_.comm_abort(child_);
}

}  // namespace pycomm::nccl
