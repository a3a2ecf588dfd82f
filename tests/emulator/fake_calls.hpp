// The calls of a fake NCCL communicator, as messages between its ranks.
#pragma once

#include <array>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "fake_wires.hpp"
#include "fiber.hpp"
#include "kernels/kernels.h"

namespace fake_nccl {

using pycomm::Dtype;
using pycomm::ReduceOp;
using pycomm::nccl::NcclData;
using pycomm::nccl::NcclResult;

// By NcclDtype. Reductions of those without a counterpart here are refused.
struct Type {
  size_t bytes;
  int dtype;
};
inline constexpr std::array<Type, 10> kTypes{{{1, static_cast<int>(Dtype::int8)},
                                              {1, static_cast<int>(Dtype::uint8)},
                                              {4, static_cast<int>(Dtype::int32)},
                                              {4, -1},
                                              {8, static_cast<int>(Dtype::int64)},
                                              {8, -1},
                                              {2, static_cast<int>(Dtype::float16)},
                                              {4, static_cast<int>(Dtype::float32)},
                                              {8, static_cast<int>(Dtype::float64)},
                                              {2, static_cast<int>(Dtype::bfloat16)}}};
inline constexpr std::array kOps{ReduceOp::sum, ReduceOp::product, ReduceOp::max, ReduceOp::min,
                                 ReduceOp::avg};

struct Call {
  NcclData data;
  Header header;
  int peer;  // of a message
  bool sends;
  std::vector<Launched> before{};  // of a collective, by peer: as in Header
};

inline size_t bytes_of(const Call& call) {
  return call.header.count * kTypes.at(static_cast<size_t>(call.header.dtype)).bytes;
}

// A collective: each rank's part in its slot, then the results.
class Collective {
 public:
  Collective(const Call& call, const Wires& wires)
      : call_(call), size_(wires.size()), rank_(wires.rank()), bytes_(bytes_of(call)) {
    slots_.resize(bytes_ * static_cast<size_t>(size_));
    const bool one_way = call.header.kind == Kind::broadcast;
    const bool gives = !one_way || rank_ == call.header.root;
    if (gives) {
      emulator::device_reads(given_to(rank_), bytes_);
      std::memcpy(slot(rank_), given_to(rank_), bytes_);
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      Header header = call.header;
      if (!call.before.empty()) header.before = call.before.at(static_cast<size_t>(peer));
      if (gives) transfers.emplace_back(header, peer, given_to(peer), bytes_, true);
      if (!one_way || peer == call.header.root)
        transfers.emplace_back(header, peer, slot(peer), bytes_, false);
    }
  }

  void finish() {
    const bool all = call_.header.kind == Kind::all_gather;
    emulator::device_writes(call_.data.out, bytes_ * static_cast<size_t>(all ? size_ : 1));
    switch (call_.header.kind) {
      case Kind::message:
        return;
      case Kind::all_gather:
        std::memcpy(call_.data.out, slots_.data(), slots_.size());
        return;
      case Kind::broadcast:
        std::memcpy(call_.data.out, slot(call_.header.root), bytes_);
        return;
      case Kind::all_reduce:
      case Kind::reduce_scatter: {
        const int dtype = kTypes.at(static_cast<size_t>(call_.header.dtype)).dtype;
        const auto op = kOps.at(static_cast<size_t>(call_.header.op));
        if (dtype < 0) throw Failed(NcclResult::invalid_argument, "no arithmetic of this dtype");
        pycomm::kernels::reducer(static_cast<Dtype>(dtype), op)
            .fold(call_.data.out, slots_.data(), call_.header.count, size_);
      }
    }
  }

  std::vector<Transfer> transfers;

 private:
  std::byte* slot(int rank) { return slots_.data() + static_cast<size_t>(rank) * bytes_; }
  std::byte* given_to(int peer) const {
    const bool own_part = call_.header.kind == Kind::reduce_scatter;
    auto* in = static_cast<std::byte*>(const_cast<void*>(call_.data.in));
    return in + (own_part ? static_cast<size_t>(peer) * bytes_ : 0);
  }

  Call call_;
  int size_, rank_;
  size_t bytes_;
  std::vector<std::byte> slots_;
};

// Steps what can move; messages with one peer in one direction keep their order. True when all
// have.
inline bool step_all(std::vector<Transfer>& transfers, Wires& wires) {
  std::set<std::pair<int, bool>> waiting;
  std::erase_if(transfers, [&](Transfer& one) {
    if (waiting.contains({one.peer(), one.sends()})) return false;
    if (one.step(wires)) return true;
    waiting.insert({one.peer(), one.sends()});
    return false;
  });
  return transfers.empty();
}

// A running group: first its messages, all at once, then its collectives, one by one.
struct Running {
  std::vector<Transfer> messages;
  std::vector<Collective> collectives;

  Running(const std::vector<Call>& calls, const Wires& wires) {
    for (const Call& call : calls) {
      void* at = call.sends ? const_cast<void*>(call.data.in) : call.data.out;
      if (call.header.kind == Kind::message)
        messages.emplace_back(call.header, call.peer, static_cast<std::byte*>(at), bytes_of(call),
                              call.sends);
      else
        collectives.emplace_back(call, wires);
    }
  }
  bool step(Wires& wires) {
    if (!step_all(messages, wires)) return false;
    while (!collectives.empty()) {
      if (!step_all(collectives.front().transfers, wires)) return false;
      collectives.front().finish();
      collectives.erase(collectives.begin());
    }
    return true;
  }
};

}  // namespace fake_nccl
