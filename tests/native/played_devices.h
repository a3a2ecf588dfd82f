// A device and an NCCL that do what a test says, for groups on devices.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "device/device.h"
#include "nccl/nccl.h"

namespace played {

using namespace pycomm;

// A device whose events pass on command.
class PlayedDevice : public device::Device {
 public:
  explicit PlayedDevice(int index = 0) : index_(index) {}

  std::atomic<bool> through = false, captures = false;
  int processors = 132;
  std::function<void()> on_record{};  // before an event is recorded

  int index() const override { return index_; }
  std::string bus_id() override { return "played " + std::to_string(index_); }
  std::string description() override { return "played"; }
  int multiprocessors() override { return processors; }
  void while_current(const std::function<void()>& body) override { body(); }
  void* make_stream() override { return this; }
  void drop_stream(void*) noexcept override {}
  bool capturing(void*) override { return captures; }
  void finish(void*) noexcept override {}
  void* make_event() override { return this; }
  void drop_event(void*) noexcept override {}
  void record(void*, void*) override {
    if (on_record) on_record();
  }
  void wait(void*, void*) override {}
  bool passed(void*) override { return through; }
  void* allocate(size_t) override { return nullptr; }
  void release(void*) noexcept override {}
  void* allocate_host(size_t) override { return nullptr; }
  void release_host(void*) noexcept override {}
  void call(void*, void (*)(void*), void*) override {}
  void wait_until(void*, const uint32_t*, uint32_t) override {}
  void copy(void*, const void*, size_t, void*) override {}
  void clear(void*, size_t, void*) override {}
  void reduce(const device::Reduction&, void*) override {}

 private:
  int index_;
};

using nccl::NcclComm;
using nccl::NcclResult;

// An NCCL whose calls succeed unless a test says otherwise, and which counts its communicators.
class PlayedNccl : public nccl::NcclApi {
 public:
  std::atomic<int> live = 0;  // communicators that were neither destroyed nor aborted
  std::atomic<NcclResult> init = NcclResult::success, split = NcclResult::in_progress,
                          state = NcclResult::success;
  std::atomic<int> max_ctas = -1, childs_max_ctas = -1;  // of the last communicator
  std::function<void()> on_group_end{}, on_destroy{};
  std::function<void(bool of_parent)> on_abort{};

  int version() const override { return 23203; }
  std::string origin() const override { return "tests/native"; }
  std::string error_string(NcclResult) override { return "a played error"; }
  std::string last_error() override { return {}; }
  NcclResult get_unique_id(nccl::NcclId& id) override { return id = {}, state.load(); }
  NcclResult comm_init_rank(NcclComm*& comm, int, const nccl::NcclId&, int,
                            nccl::NcclOptions options) override {
    max_ctas = options.max_ctas;
    comm = reinterpret_cast<NcclComm*>(&parent_);
    return ++live, init.load();
  }
  NcclResult comm_split(NcclComm*, int, NcclComm*& child, nccl::NcclOptions options) override {
    childs_max_ctas = options.max_ctas;
    if (split != NcclResult::in_progress) return split;
    child = reinterpret_cast<NcclComm*>(&child_);
    return ++live, split.load();
  }
  NcclResult comm_destroy(NcclComm*) override {
    if (on_destroy) on_destroy();
    return --live, NcclResult::success;
  }
  NcclResult comm_abort(NcclComm* comm) override {
    if (on_abort) on_abort(comm == reinterpret_cast<NcclComm*>(&parent_));
    return --live, NcclResult::success;
  }
  NcclResult comm_async_error(NcclComm*, NcclResult& error) override {
    return error = state, NcclResult::success;
  }
  NcclResult group_start() override { return NcclResult::success; }
  NcclResult group_end() override {
    if (on_group_end) on_group_end();
    return NcclResult::success;
  }
  NcclResult send(nccl::NcclData, int, nccl::NcclQueue) override { return state; }
  NcclResult recv(nccl::NcclData, int, nccl::NcclQueue) override { return state; }
  NcclResult all_reduce(nccl::NcclData, nccl::NcclOp, nccl::NcclQueue) override { return state; }
  NcclResult all_gather(nccl::NcclData, nccl::NcclQueue) override { return state; }
  NcclResult reduce_scatter(nccl::NcclData, nccl::NcclOp, nccl::NcclQueue) override {
    return state;
  }
  NcclResult broadcast(nccl::NcclData, int, nccl::NcclQueue) override { return state; }

 private:
  char parent_{}, child_{};  // their addresses are the communicators
};

}  // namespace played
