// Calls by NCCL: its own collectives, or plans whose messages are its sends and receives.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/choose.h"
#include "device/stream_engine.h"
#include "group/carrier.h"
#include "group/check.h"

namespace pycomm {
namespace {

constexpr size_t kMaxPlans = 256;
// Of a call's array that a lane is worth its launches for. To be measured.
constexpr size_t kLaneBytes = size_t{1} << 20;
constexpr int kMostLanes = 8;

class NcclCarrier final : public Carrier {
 public:
  NcclCarrier(std::shared_ptr<Group> host, std::shared_ptr<Device> device,
              std::shared_ptr<NcclApi> nccl)
      : host_(std::move(host)),
        nccl_(std::move(nccl)),
        engine_(nccl_, std::move(device), host_->rank(), host_->size()) {}

  void meet(int lanes, std::chrono::nanoseconds timeout);

  Algorithm algorithm_for(const Call& call) const override;
  Carried prepare(const Call& call) override;
  std::shared_ptr<Event> event() override { return engine_.event(); }
  std::shared_ptr<Event> enqueue(const Carried& carried, Event& before,
                                 const Deadline& deadline) override {
    return engine_.enqueue(job_of(carried), before, deadline);
  }
  Stats stats() const override {
    const StreamTraffic& traffic = engine_.traffic();
    return {.frames_sent = traffic.groups,
            .bytes_sent = traffic.bytes_sent,
            .algorithm = Algorithm::nccl};
  }

  std::optional<Error> trouble(const std::string& what) override;
  void close(const Deadline& deadline) noexcept override {
    for (Communicator* const communicator : communicators_) communicator->close(deadline);
    abort({});
  }
  void abort(const std::string& /*reason*/) noexcept override {
    for (Communicator* const communicator : communicators_) communicator->abort();
  }

 private:
  static StreamJob job_of(const Carried& carried);
  int lanes_of(const Call& call) const;
  std::shared_ptr<const std::vector<Stages>> plan_of(const Call& call);

  std::shared_ptr<Group> host_;
  std::shared_ptr<NcclApi> nccl_;
  StreamEngine engine_;
  std::vector<Communicator*> communicators_;  // the engine's, by lane
  std::map<std::tuple<Operation, Algorithm, size_t, int, int>,
           std::shared_ptr<const std::vector<Stages>>>
      plans_;
};

// Rank 0 names the communicators. Those that cannot make one, and those whom they keep waiting,
// end.
void NcclCarrier::meet(int lanes, std::chrono::nanoseconds timeout) {
  const Deadline deadline(timeout);
  struct {
    int32_t count;
    std::array<NcclId, kMostLanes> ids;
  } named{.count = lanes, .ids = {}};
  if (host_->rank() == 0 && host_->size() > 1)
    for (NcclId& id : std::span(named.ids).first(static_cast<size_t>(lanes)))
      if (const NcclResult made = nccl_->get_unique_id(id); made != NcclResult::success)
        throw InternalError(nccl_error_text(*nccl_, "ncclGetUniqueId", made, nullptr));
  host_->run({.operation = Operation::broadcast,
              .output = &named,
              .count = sizeof named,
              .timeout = timeout});
  try {
    engine_.meet(std::span(named.ids).first(static_cast<size_t>(named.count)), deadline);
    communicators_ = engine_.communicators();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::timeout) throw;
    throw Unsupported(error.what(), error.fields());
  }
}

// NCCL's own where there is one, as it knows how its GPUs are connected; but for sums whose order
// has to be ours.
Algorithm NcclCarrier::algorithm_for(const Call& call) const {
  const int size = host_->size();
  const bool own = call.counts.empty() && has_nccl(call.operation, call.dtype, call.op);
  if (call.algorithm == Algorithm::nccl && !own)
    lacks(call,
          "NCCL has none of its own for this dtype, op or list of counts; leave the algorithm out, "
          "or name one of ours");
  if (call.algorithm == Algorithm::staged)
    lacks(call, "the algorithm staged is for ranks that share a GPU");
  if (call.algorithm == Algorithm::nccl && size == 1) return Algorithm::direct;
  if (call.algorithm != Algorithm::automatic) return call.algorithm;
  const bool ordered = reduces(call.operation) && host_->reproducible();
  if (size > 1 && !ordered && own) return Algorithm::nccl;
  return choose({.operation = call.operation,
                 .dtype = call.dtype,
                 .op = call.op,
                 .size = size,
                 .count = count_to_choose_by(call),
                 .reproducible = host_->reproducible(),
                 .ragged = !call.counts.empty(),
                 .hosts = host_->host_count()});
}

// The same on all ranks.
int NcclCarrier::lanes_of(const Call& call) const {
  if (call.algorithm != Algorithm::ring || communicators_.empty()) return 1;
  const size_t worth = call.count * bytes_of(call.dtype) / kLaneBytes;
  return static_cast<int>(std::clamp<size_t>(worth, 1, communicators_.size()));
}

// Null for NCCL's own.
std::shared_ptr<const std::vector<Stages>> NcclCarrier::plan_of(const Call& call) {
  if (call.algorithm == Algorithm::nccl) return nullptr;
  const Place at{.rank = host_->rank(),
                 .size = host_->size(),
                 .count = call.count,
                 .root = is_rooted(call.operation) ? call.peer : 0,
                 .counts = call.counts,
                 .hosts = host_->hosts()};
  const int lanes = lanes_of(call);
  const auto made = [&] {
    const Plan plan = make_plan(call.algorithm, call.operation, at);
    return std::make_shared<const std::vector<Stages>>(make_lanes(plan, at.rank, lanes));
  };
  if (!call.counts.empty()) return made();  // lists change from call to call
  const auto key = std::tuple(call.operation, call.algorithm, call.count, at.root, lanes);
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  if (plans_.size() >= kMaxPlans) plans_.clear();
  return plans_.emplace(key, made()).first->second;
}

StreamJob NcclCarrier::job_of(const Carried& carried) {
  const Call& call = carried.call;
  return {.plan = carried.plan.get(),
          .operation = call.operation,
          .dtype = call.dtype,
          .op = call.op,
          .input = static_cast<const std::byte*>(call.input),
          .output = static_cast<std::byte*>(call.output),
          .count = call.count,
          .peer = call.peer};
}

Carried NcclCarrier::prepare(const Call& call) {
  Carried carried{.call = call, .plan = plan_of(call)};
  engine_.prepare(job_of(carried), call.stream);
  return carried;
}

std::optional<Error> NcclCarrier::trouble(const std::string& what) {
  for (Communicator* const communicator : communicators_) {
    const NcclResult state = communicator->state();
    if (state != NcclResult::success && state != NcclResult::in_progress)
      return communicator->error_of(what, state);
  }
  return std::nullopt;
}

}  // namespace

std::unique_ptr<Carrier> carry_by_nccl(std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                                       std::shared_ptr<NcclApi> nccl, int lanes,
                                       std::chrono::nanoseconds timeout) {
  if (lanes < 1 || lanes > kMostLanes)
    throw InvalidArgument("a group on devices has 1 to " + std::to_string(kMostLanes) +
                          " lanes, not " + std::to_string(lanes));
  auto carrier = std::make_unique<NcclCarrier>(std::move(host), std::move(device), std::move(nccl));
  carrier->meet(lanes, timeout);
  return carrier;
}

}  // namespace pycomm
