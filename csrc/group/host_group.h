// The group for arrays in host memory: checks a call, chooses its plan and runs it.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/mesh.h"
#include "engine/engine.h"
#include "group/call_log.h"
#include "group/call_runner.h"
#include "group/connect_options.h"
#include "group/group.h"
#include "group/prepared_call.h"
#include "group/worker.h"
#include "observe/heartbeat_thread.h"

namespace pycomm::group {

class HostGroup final : public Group {
 public:
  // `options.secret` must hold the shared secret.
  HostGroup(ConnectOptions options, bootstrap::Mesh mesh, std::vector<int> ranks);
  ~HostGroup() override;

  const GroupInfo& info() const override { return info_; }
  void run(const Call& call) override;
  std::shared_ptr<Work> start(const Call& call,
                              std::function<void(std::exception_ptr)> then) override;
  AgreedCalls exchange(std::span<const Call> calls, MessageProgress* progress) override;
  void run_together(const std::function<void()>& body, std::chrono::nanoseconds limit) override;
  std::shared_ptr<Work> start_together(std::function<void()> body,
                                       std::function<void(std::exception_ptr)> then) override {
    return worker_.start(std::move(body), std::move(then));
  }
  std::shared_ptr<Group> split(int color, int key) override;
  std::shared_ptr<Group> pair_with(int peer) override;
  std::shared_ptr<Group> regroup(rendezvous::Store& store, const std::string& name, int rank,
                                 std::vector<int> ranks, std::chrono::nanoseconds timeout) override;
  std::shared_ptr<Group> connect_part(rendezvous::Store& store, ConnectOptions options) override;
  std::shared_ptr<std::byte> allocate(size_t bytes) override {
    return heap_ ? heap_->allocate(bytes) : nullptr;
  }
  Stats stats() const override { return log_.stats(); }
  bool broken() const override { return engine_.broken(); }
  Status status() const override;
  void set_timeout(std::chrono::nanoseconds timeout) override;
  void close_after_peers(std::chrono::nanoseconds wait) noexcept override;
  void abort(const std::string& reason) noexcept override;
  void check_for_failures(std::chrono::nanoseconds limit) override;

  // Selects plans for the longest round trip of all ranks from now on, and starts to send
  // heartbeats. Call once, when the group is complete.
  void complete(std::chrono::microseconds round_trip);

 private:
  const kernels::Reducer* check(const Call& call) const;
  // Waits until all calls started before are complete.
  Worker::Turn take_turn(const Call& call);
  std::chrono::nanoseconds limit_of(const Call& call) const {
    return call.timeout.count() > 0 ? call.timeout : timeout_.load();
  }
  void execute(PreparedCall prepared);
  std::optional<Worker::Completed> receive_any(std::span<const PendingReceive* const> pending);
  std::exception_ptr log_failure(uint64_t number, const PreparedCall& prepared);

  ConnectOptions options_;
  GroupInfo info_;
  std::atomic<std::chrono::nanoseconds> timeout_;  // of calls without their own
  uint64_t id_;                                    // unique, equal on all ranks
  int splits_ = 0;
  std::mutex mutex_;                                  // of parts_
  std::map<std::string, int> parts_;                  // by name: how many connect_part() made
  std::unique_ptr<engine::PeerConnector> connector_;  // null if the mesh is complete
  engine::Engine engine_;
  std::shared_ptr<os::SharedHeap> heap_;  // of this process, if the region has heaps
  CallRunner runner_;
  CallLog log_;
  Worker worker_;    // last members: their threads end before the members they use
  Worker messages_;  // the asynchronous messages that run beside collectives
  observe::HeartbeatThread heartbeat_;
};

}  // namespace pycomm::group
