// What the verbs mean in which ranks give each other different things: messages, gather, scatter,
// all-to-all. Tensors in, a Job out, as in c10d_verbs.h.
//
// Included by c10d_backend.h only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "bindings/c10d_verbs.h"

namespace pycomm::bindings {

inline void add_send(Job& job, const at::Tensor& tensor, int peer, uint32_t tag) {
  const at::Tensor plain = readable(job, tensor);
  Call call = moving(Operation::send, plain);
  call.input = bytes_at(plain);
  call.peer = peer;
  call.tag = tag;
  job.calls.push_back(call);
}

inline void add_recv(Job& job, const at::Tensor& tensor, int peer, uint32_t tag) {
  const at::Tensor plain = writable(job, tensor, Values::unused);
  Call call = moving(Operation::recv, plain);
  call.output = bytes_at(plain);
  call.peer = peer;
  call.tag = tag;
  job.calls.push_back(call);
}

// Sends and receives of several ranks in an order in which they cannot wait for each other in a
// ring: all ranks agree on it (pairs in order; within a pair, from the lower rank to the higher
// first), so the first transfer that is not over always has both its ends at work.
template <typename Calls>
void sort_transfers(Calls& calls, int rank) {
  const auto place = [rank](const Call& call) {
    const bool up = (call.operation == Operation::send) == (rank < call.peer);
    return std::tuple(std::min(rank, call.peer), std::max(rank, call.peer), !up);
  };
  std::stable_sort(calls.begin(), calls.end(),
                   [&](const Call& a, const Call& b) { return place(a) < place(b); });
}

inline Job send(const Tensors& tensors, int peer, int tag) {
  Job job{c10d::OpType::SEND, "pycomm:send", tensors, tensors};
  add_send(job, only(job, tensors), peer, static_cast<uint32_t>(tag));
  return job;
}

inline Job recv(const Tensors& tensors, int peer, int tag) {
  Job job{c10d::OpType::RECV, "pycomm:recv", tensors, tensors};
  add_recv(job, only(job, tensors), peer, static_cast<uint32_t>(tag));
  return job;
}

inline Job recv_from_any(const Tensors& tensors, int tag) {
  Job job{c10d::OpType::RECVANYSOURCE, "pycomm:recvAnySource", tensors, tensors};
  add_recv(job, only(job, tensors), kAnySource, static_cast<uint32_t>(tag));
  job.source = std::make_shared<int>(-1);
  job.calls.back().source = job.source.get();
  return job;
}

// The list that the root alone gives: one tensor like `like` for each rank.
inline const Tensors& roots_list(Job& job, RankSlot seat, const std::vector<Tensors>& lists,
                                 const at::Tensor& like) {
  if (lists.size() != 1 || lists.front().size() != static_cast<size_t>(seat.size))
    job.refuse("the root takes one list of " + std::to_string(seat.size) + " tensors");
  for (const auto& tensor : lists.front()) {
    check_place(job, tensor);
    check_elements(job, tensor, like, like.numel());
  }
  return lists.front();
}

inline Job gather(RankSlot seat, const std::vector<Tensors>& outputs, const Tensors& inputs,
                  const c10d::GatherOptions& opts) {
  Job job{.type = c10d::OpType::GATHER, .title = "pycomm:gather", .inputs = inputs};
  const at::Tensor input = readable(job, only(job, inputs));
  check_root(job, seat, opts.rootRank);
  Call call = moving(Operation::gather, input);
  call.input = bytes_at(input);
  call.peer = static_cast<int>(opts.rootRank);
  if (seat.rank == call.peer) {
    job.outputs = roots_list(job, seat, outputs, input);
    char* const flat = gathered(job, job.outputs);
    const size_t bytes = input.nbytes();
    const MemoryRange all{flat, flat + bytes * job.outputs.size()};
    call.input = bytes_at(apart(job, input, all, flat + bytes * static_cast<size_t>(seat.rank)));
    call.output = flat;
  } else if (!outputs.empty()) {
    job.refuse("only the root takes outputs");
  }
  job.calls.push_back(call);
  return job;
}

inline Job scatter(RankSlot seat, const Tensors& outputs, const std::vector<Tensors>& inputs,
                   const c10d::ScatterOptions& opts) {
  Job job{.type = c10d::OpType::SCATTER, .title = "pycomm:scatter", .outputs = outputs};
  at::Tensor output = writable(job, only(job, outputs), Values::unused);
  check_root(job, seat, opts.rootRank);
  Call call = moving(Operation::scatter, output);
  call.peer = static_cast<int>(opts.rootRank);
  if (seat.rank == call.peer) {
    job.inputs = roots_list(job, seat, inputs, output);
    const at::Tensor flat = flattened(job, job.inputs);
    output = apart(job, output, flat, seat);
    call.input = bytes_at(flat);
  } else if (inputs.empty()) {
    job.inputs = outputs;
  } else {
    job.refuse("only the root takes inputs");
  }
  call.output = bytes_at(output);
  job.calls.push_back(call);
  return job;
}

// `counts`: elements of the tensors for each rank, then from each; empty: as many for all.
inline void add_all_to_all(Job& job, RankSlot seat, MemoryRange output, const at::Tensor& input,
                           std::vector<size_t> counts) {
  Call call = moving(Operation::all_to_all, input);
  call.input = bytes_at(apart(job, input, output, nullptr));
  call.output = output.begin;
  call.count = counts.empty() ? call.count / static_cast<size_t>(seat.size) : 0;
  call.counts = std::move(counts);
  job.calls.push_back(std::move(call));
}

inline Job all_to_all(RankSlot seat, const Tensors& outputs, const Tensors& inputs) {
  Job job{.type = c10d::OpType::ALLTOALL,
          .title = "pycomm:all_to_all",
          .inputs = inputs,
          .outputs = outputs};
  const auto size = static_cast<size_t>(seat.size);
  if (outputs.size() != size || inputs.size() != size)
    job.refuse("takes " + std::to_string(size) + " inputs and as many outputs");
  for (const Tensors* list : {&inputs, &outputs})
    for (const auto& tensor : *list) {
      check_place(job, tensor);
      check_elements(job, tensor, inputs.front(), tensor.numel());
    }
  const auto own = static_cast<size_t>(seat.rank);
  check_elements(job, outputs[own], inputs[own], inputs[own].numel());
  std::vector<size_t> counts = counts_of(inputs);
  const std::vector<size_t> back = counts_of(outputs);
  counts.insert(counts.end(), back.begin(), back.end());
  const at::Tensor from = flattened(job, inputs);
  char* const to = gathered(job, outputs);
  size_t bytes = 0;
  for (const auto& output : outputs) bytes += output.nbytes();
  add_all_to_all(job, seat, {to, to + bytes}, from, std::move(counts));
  return job;
}

// Elements for each rank: the rows that `splits` says or, where it is empty, as many for each.
inline void add_counts(std::vector<size_t>& counts, const Job& job, RankSlot seat,
                       const at::Tensor& tensor, const std::vector<int64_t>& splits) {
  if (tensor.dim() == 0) job.refuse("a tensor without dimensions has no rows to split");
  const int64_t rows = tensor.size(0);
  std::vector<int64_t> sizes = splits;
  if (splits.empty()) sizes.assign(static_cast<size_t>(seat.size), rows / seat.size);
  if (sizes.size() != static_cast<size_t>(seat.size) ||
      std::any_of(sizes.begin(), sizes.end(), [](int64_t n) { return n < 0; }) ||
      std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) != rows)
    job.refuse("the " + std::to_string(rows) + " rows of a tensor are not what " +
               std::to_string(seat.size) + " splits add up to");
  const int64_t width = rows == 0 ? 0 : tensor.numel() / rows;
  for (const int64_t size : sizes)
    counts.push_back(static_cast<size_t>(size * width) * moved_as(tensor).parts);
}

inline Job all_to_all_rows(RankSlot seat, const at::Tensor& output, const at::Tensor& input,
                           const std::vector<int64_t>& output_splits,
                           const std::vector<int64_t>& input_splits) {
  Job job{.type = c10d::OpType::ALLTOALL_BASE,
          .title = "pycomm:all_to_all",
          .inputs = {input},
          .outputs = {output}};
  const at::Tensor from = readable(job, input);
  const at::Tensor to = writable(job, output, Values::unused);
  check_elements(job, to, from, to.numel());
  std::vector<size_t> counts;
  add_counts(counts, job, seat, from, input_splits);
  add_counts(counts, job, seat, to, output_splits);
  if (input_splits.empty() && output_splits.empty()) {
    check_elements(job, to, from, from.numel());
    counts.clear();
  }
  add_all_to_all(job, seat, memory_of(to), from, std::move(counts));
  return job;
}

}  // namespace pycomm::bindings
