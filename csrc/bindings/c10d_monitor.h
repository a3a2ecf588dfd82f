// monitored_barrier: a barrier in which rank 0 finds out which ranks are missing.
//
// Every rank reports to rank 0, which receives the reports in any order and answers once it has
// all. An error breaks the group, because the missing ranks are out of step.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "bindings/c10d_tensors.h"
#include "bindings/c10d_verbs.h"
#include "group/group.h"

namespace pycomm::bindings {

class MonitoredBarrier {
 public:
  // `name_all`: the error names all missing ranks, otherwise the first.
  MonitoredBarrier(group::Group& group, std::chrono::milliseconds limit, bool name_all)
      : group_(group), limit_(limit), name_all_(name_all) {}

  void run() {
    if (limit_.count() <= 0)
      throw Timeout("Rank " + std::to_string(group_.rank()) +
                        " timed out in monitoredBarrier after " + std::to_string(limit_.count()) +
                        " ms",
                    fields());
    group_.rank() == 0 ? receive_all() : report();
  }

 private:
  // Above torch's own tags, which are below 2^31.
  static constexpr uint32_t kTag = 0xBA221E40;

  ErrorFields fields(int peer = -1) const {
    return {.op = "monitored_barrier",
            .rank = group_.rank(),
            .peer = peer,
            .elapsed_s = std::chrono::duration<double>(Clock::now() - start_).count()};
  }

  void transfer(Operation operation, int peer, int* source = nullptr) {
    uint8_t byte = 1;
    const auto left = limit_ - (Clock::now() - start_);
    group_.run({.operation = operation,
                .input = &byte,
                .output = &byte,
                .count = 1,
                .peer = peer,
                .tag = kTag,
                .timeout = std::max<std::chrono::nanoseconds>(left, std::chrono::milliseconds(1)),
                .source = source});
  }

  void report() {
    try {
      transfer(Operation::send, 0);
      transfer(Operation::recv, 0);
    } catch (const Error& error) {
      throw Error(error.kind(),
                  "Rank " + std::to_string(group_.rank()) +
                      " successfully reached monitoredBarrier, but received errors while waiting "
                      "for send/recv from rank 0: " +
                      error.what(),
                  fields(0));
    }
  }

  void receive_all() {
    std::vector<bool> arrived(static_cast<size_t>(group_.size()));
    arrived[0] = true;
    for (int i = 1; i < group_.size(); ++i) {
      int source = group::kAnySource;
      try {
        transfer(Operation::recv, group::kAnySource, &source);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::timeout) throw;
        throw_late(arrived, error);
      }
      arrived[static_cast<size_t>(source)] = true;
    }
    for (int peer = 1; peer < group_.size(); ++peer) transfer(Operation::send, peer);
  }

  [[noreturn]] void throw_late(const std::vector<bool>& arrived, const Error& error) const {
    std::string late;
    int first = -1;
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (arrived[static_cast<size_t>(rank)] || (first >= 0 && !name_all_)) continue;
      if (first < 0) first = rank;
      late += (late.empty() ? "" : ", ") + std::to_string(rank);
    }
    throw Timeout((name_all_ ? "Ranks " : "Rank ") + late + " failed to pass monitoredBarrier in " +
                      std::to_string(limit_.count()) + " ms (" + error.what() + ")",
                  fields(first));
  }

  using Clock = std::chrono::steady_clock;
  group::Group& group_;
  const std::chrono::milliseconds limit_;
  const bool name_all_;
  const Clock::time_point start_ = Clock::now();
};

}  // namespace pycomm::bindings
