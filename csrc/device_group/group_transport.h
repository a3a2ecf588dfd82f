// Sends messages between devices through a group for host memory, of the same ranks.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/host_staging_channel.h"
#include "group/group.h"

namespace pycomm::device_group {

// Sends and receives as the engine and staging channels take them, without empty ones. `rank_of`:
// the rank of a call's peer there.
template <typename RankOf>
std::vector<device::PeerMessage> peer_messages(std::span<const group::Call> messages,
                                               const RankOf& rank_of) {
  std::vector<device::PeerMessage> made;
  for (const group::Call& call : messages) {
    const bool sends = call.operation == Operation::send;
    void* const data = sends ? const_cast<void*>(call.input) : call.output;
    if (call.count > 0)
      made.push_back({rank_of(call.peer), sends, static_cast<std::byte*>(data),
                      call.count * bytes_of(call.dtype)});
  }
  return made;
}

// Each staging channel has its own group, because its calls run when the device reaches them.
class GroupTransport final : public device::HostTransport {
 public:
  explicit GroupTransport(std::shared_ptr<group::Group> group) : group_(std::move(group)) {}
  void exchange(std::span<const device::PeerMessage> messages, std::chrono::nanoseconds timeout,
                MessageProgress& progress) override {
    std::vector<group::Call> calls;
    for (const auto& [peer, sends, data, bytes] : messages)
      calls.push_back({.operation = sends ? Operation::send : Operation::recv,
                       .input = sends ? data : nullptr,
                       .output = sends ? nullptr : data,
                       .count = bytes,
                       .peer = peer,
                       .timeout = timeout});
    group_->exchange(calls, &progress);
  }
  void abort(const std::string& reason) noexcept override { group_->abort(reason); }
  void close() noexcept override { group_->close(); }

 private:
  std::shared_ptr<group::Group> group_;
};

}  // namespace pycomm::device_group
