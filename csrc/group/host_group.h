// The group for arrays in host memory: checks a call, chooses its plan and runs it.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bootstrap/mesh.h"
#include "engine/engine.h"
#include "group/connect_options.h"
#include "group/group.h"
#include "group/worker.h"
#include "observe/flight_recorder.h"
#include "observe/heartbeat_thread.h"
#include "shared/hierarchical_all_reduce.h"
#include "shared/shared_memory_region.h"

namespace pycomm {

class HostGroup final : public Group {
 public:
  // `options.secret` must hold the shared secret.
  HostGroup(ConnectOptions options, Mesh mesh, std::vector<int> ranks);
  ~HostGroup() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const std::string& name() const override { return options_.name; }
  const std::vector<Member>& members() const override { return members_; }
  const std::vector<int>& ranks() const override { return ranks_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }
  int host_count() const override { return host_count_; }
  const std::vector<int>& hosts() const override { return hosts_; }
  bool encrypted() const override { return options_.encrypt; }
  bool reproducible() const override { return options_.reproducible; }

  void run(const Call& call) override;
  std::shared_ptr<Work> start(const Call& call,
                              std::function<void(std::exception_ptr)> then) override;
  void exchange(std::span<const Call> calls) override;
  std::shared_ptr<Group> split(int color, int key) override;
  std::vector<int> lost() const override { return engine_.lost(); }
  std::shared_ptr<Group> regroup(Store& store, const std::string& name,
                                 const std::vector<int>& members,
                                 std::chrono::nanoseconds timeout) override;
  std::shared_ptr<std::byte> allocate(size_t bytes) override {
    return heap_ ? heap_->allocate(bytes) : nullptr;
  }
  Stats stats() const override;
  Status status() const override;
  void set_timeout(std::chrono::nanoseconds timeout) override;
  void close() noexcept override;
  void abort(const std::string& reason) noexcept override;
  void hear(std::chrono::nanoseconds limit) override;

  // Starts sending heartbeats. Call once, when the group is complete.
  void start_heartbeat();

 private:
  // A plan for blocks of `block` elements. A call whose scratch would be too large runs in several
  // blocks.
  struct Planned {
    Schedule schedule;
    size_t block = 0;
  };

  void take_turn(const Call& call, const Worker::Timed& body);
  std::chrono::nanoseconds limit_of(const Call& call) const;
  // `since`: when the call's timeout starts; {}: now.
  void execute(const Call& call, Clock::time_point since);
  using Body = std::function<void(const Deadline&)>;
  void execute(const Call& call, Algorithm algorithm, Clock::time_point since, const Body& body);
  void carry_out(const Call& call, Algorithm algorithm, const Deadline& deadline);
  Clock::time_point end_call(bool failed);
  std::string record_failure(const Error& error);
  Algorithm algorithm_for(const Call& call) const;
  void make_region(const std::vector<std::shared_ptr<std::byte>>& memories);
  void execute_plan(const Call& call, Algorithm algorithm, const Deadline& deadline);
  void run_plan(const PlanJob& job, const Deadline& deadline);
  void check(const Call& call) const;
  void agree(const Call& call, const Deadline& deadline);
  // For an all_to_all with counts: throws Mismatch on all ranks if one rank sends a different count
  // than its receiver expects.
  void check_splits(const Call& call, const Header& signature, const Deadline& deadline);
  std::vector<size_t> gather_splits(const Call& call, const Header& signature,
                                    const Deadline& deadline);
  void execute_shared(const Call& call, const Deadline& deadline);
  void execute_blocks(const Call& call, PlanJob& job, const Deadline& deadline);
  const Planned& planned(const Call& call, Algorithm algorithm, size_t count);
  CollectiveShape place(int rank, const Call& call, size_t count) const;
  Schedule schedule_of(const Call& call, Algorithm algorithm, size_t count) const;
  size_t block_of(const Call& call, Algorithm algorithm) const;
  std::vector<std::string> gather_texts(const std::string& mine);
  ConnectOptions subgroup_options(const std::vector<int>& members, const std::string& name) const;
  std::vector<int> first_ranks(const std::vector<int>& members) const;

  ConnectOptions options_;
  std::vector<Member> members_;
  std::vector<int> ranks_;
  std::vector<int> hosts_;
  int local_rank_ = 0, local_size_ = 1, host_count_ = 1;
  Thresholds thresholds_;  // the same on all ranks
  int splits_ = 0;
  std::unique_ptr<PeerConnector> connector_;  // null if the mesh is complete
  Engine engine_;
  std::shared_ptr<SharedHeap> heap_;  // of this process, if the region has heaps
  // Of this host's ranks, if there are several and hosts share memory.
  std::unique_ptr<SharedMemoryRegion> region_;
  std::optional<HierarchicalAllReduce> hierarchical_;  // if there are several hosts
  FlightRecorder recorder_;
  std::map<std::tuple<Operation, Algorithm, size_t, int>, Planned> plans_;
  mutable std::mutex mutex_;  // guards stats_, recorder_ and the timeout
  Stats stats_;
  Worker worker_;  // last members: their threads end before the members they use
  HeartbeatThread heartbeat_;
};

}  // namespace pycomm
