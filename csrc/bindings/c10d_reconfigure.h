// Reconfiguration, from torch 2.14 on: a backend whose ranks change, with a new group each time.
#pragma once

#include "bindings/c10d_backend.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <chrono>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

namespace pycomm::bindings {

class ReconfigurableBackend : public Backend {
 public:
  // pycomm.torch_backend's: checks a uuid and handles (true: in the order of the ranks) and returns
  // form(timeout_s), which returns a capsule of the new group.
  using Prepare = std::function<py::object(int64_t, std::vector<std::string>, bool)>;

  // `group`: an aborted group of one rank, whose error asks for reconfigure(). `rank`, `size`:
  // those that torch was given. The others are as of Backend.
  ReconfigurableBackend(std::shared_ptr<group::Group> group, c10::intrusive_ptr<c10d::Store> store,
                        c10::intrusive_ptr<bindings::Options> options, std::function<void()> ended,
                        int rank, int size, std::string handle, Prepare prepare)
      : Backend(std::move(group), std::move(store), std::move(options), true, std::move(ended)),
        handle_(std::move(handle)),
        prepare_(std::move(prepare)) {
    rank_ = rank;
    size_ = size;
  }

  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return handle_; }
  bool isInitialized() { return formed_; }  // from torch 2.15 on this overrides

  // Ends calls that are under way, on peers too. If no group forms, rank and size stay, and calls
  // raise GroupBroken until the next reconfigure(). No other thread may use the backend meanwhile,
  // except for abort(), which ends the old group only.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override {
    return with_python_errors([&]() -> WorkPtr {
      check_process();
      const milliseconds limit = opts.timeout.value_or(options_->timeout);
      const bool ordered = std::holds_alternative<std::vector<std::string>>(opts.handles);
      const auto handles = std::visit(
          [](const auto& all) { return std::vector<std::string>(all.begin(), all.end()); },
          opts.handles);
      in_python([&] {
        const py::object form = prepare_(opts.uuid, handles, ordered);
        without_gil([this] {
          for (const auto& used : device_states_.used())  // aborts those with calls in progress
            used.group->close_after_peers(std::chrono::milliseconds(1));
          group_->close();
        });
        const py::capsule made = form(std::chrono::duration<double>(limit).count());
        replace(*made.get_pointer<std::shared_ptr<group::Group>>());
      });
      const Job job{.type = c10d::OpType::UNKNOWN, .title = "pycomm:reconfigure"};
      return c10::make_intrusive<EngineWork>(rank_, sequence_, job, title_of(job), nullptr);
    });
  }

  void abort() override {
    without_gil([this] {
      const std::lock_guard lock(replacing_);
      Backend::abort();
    });
  }

 private:
  void replace(std::shared_ptr<group::Group> group) {
    without_gil([&] {
      completions_.release();
      const auto states = device_states_.take();  // destroyed unlocked, as the old group
      const std::lock_guard lock(replacing_);
      group_.swap(group);
      rank_ = group_->rank();
      size_ = group_->size();
    });
    open_groups.add(group_);
    last_split_.reset();
    batch_.reset();
    sequence_ = 0;
    error_->reset();
    formed_ = true;
  }

  const std::string handle_;
  const Prepare prepare_;
  bool formed_ = false;
  std::mutex replacing_;
};

}  // namespace pycomm::bindings

#endif
