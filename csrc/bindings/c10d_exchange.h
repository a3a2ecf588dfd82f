// Verbs in which ranks send each other different data: messages, gather, scatter, all-to-all. Like
// c10d_verbs.h: tensors in, a Job out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/c10d_verbs.h"

namespace pycomm::bindings {

inline void add_send(Job& job, const at::Tensor& tensor, int peer, uint32_t tag) {
  const at::Tensor plain = readable(job, tensor);
  group::Call call = moving(Operation::send, plain);
  call.input = bytes_at(plain);
  call.peer = peer;
  call.tag = tag;
  job.calls.push_back(call);
}

inline void add_recv(Job& job, const at::Tensor& tensor, int peer, uint32_t tag) {
  const at::Tensor plain = writable(job, tensor, Values::unused);
  group::Call call = moving(Operation::recv, plain);
  call.output = bytes_at(plain);
  call.peer = peer;
  call.tag = tag;
  job.calls.push_back(call);
}

// Whether the job consists of messages.
inline bool is_transfer(const Job& job) {
  return std::all_of(job.calls.begin(), job.calls.end(), [](const group::Call& call) {
    return call.operation == Operation::send || call.operation == Operation::recv;
  });
}

// Orders the sends and receives of several ranks so that they cannot deadlock in a ring. All ranks
// use the same order: pairs in order, and within a pair the lower rank's message first. So both
// ends always work on the first unfinished transfer.
template <typename Calls>
void sort_transfers(Calls& calls, int rank) {
  const auto place = [rank](const group::Call& call) {
    const bool up = (call.operation == Operation::send) == (rank < call.peer);
    return std::tuple(std::min(rank, call.peer), std::max(rank, call.peer), !up);
  };
  std::stable_sort(calls.begin(), calls.end(),
                   [&](const group::Call& a, const group::Call& b) { return place(a) < place(b); });
}

// Receives of a batch into the same tensor, which torch's pipelines make up to 2.13: the last one
// of the list stays, as in a sequence of calls. The others receive into temporaries.
inline void separate_receives(Job& batch, std::vector<Use>& uses) {
  std::set<std::pair<void*, size_t>> later;
  auto use = uses.rbegin();
  for (auto call = batch.calls.rbegin(); call != batch.calls.rend(); ++call) {
    if (call->operation != Operation::recv) continue;
    use = std::find_if(use, uses.rend(), [](const Use& one) { return one.written; });
    const Use received = *use++;
    if (later.emplace(bytes_at(received.tensor), received.tensor.nbytes()).second) continue;
    batch.held.push_back(
        at::empty(received.tensor.sizes(), received.tensor.options().device(batch.device)));
    call->output = bytes_at(batch.held.back());
    for (Use& one : uses)
      if (one.call == received.call) one.tensor.reset();
  }
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
  add_recv(job, only(job, tensors), group::kAnySource, static_cast<uint32_t>(tag));
  job.source = std::make_shared<int>(-1);
  job.calls.back().source = job.source.get();
  return job;
}

// The list on the root: one tensor like `like` for each rank. Other ranks pass none.
inline const Tensors& roots_list(Job& job, RankSlot slot, const std::vector<Tensors>& lists,
                                 const at::Tensor& like) {
  if (lists.size() != 1 || lists.front().size() != static_cast<size_t>(slot.size))
    job.throw_invalid("the root requires one list of " + std::to_string(slot.size) + " tensors");
  for (const auto& tensor : lists.front()) {
    check_place(job, tensor);
    check_elements(job, tensor, like, like.numel());
  }
  return lists.front();
}

// `output` is called on the root: memory for the tensors of all ranks, one after the other.
template <typename Output>
Job gather(RankSlot slot, const at::Tensor& tensor, const c10d::GatherOptions& opts,
           const Output& output) {
  Job job{.type = c10d::OpType::GATHER, .title = "pycomm:gather", .inputs = {tensor}};
  const at::Tensor input = readable(job, tensor);
  check_root(job, slot, opts.rootRank);
  group::Call call = moving(Operation::gather, input);
  call.input = bytes_at(input);
  call.peer = static_cast<int>(opts.rootRank);
  if (slot.rank == call.peer) {
    char* const flat = output(job, input);
    const size_t bytes = input.nbytes();
    const MemoryRange all{flat, flat + bytes * static_cast<size_t>(slot.size)};
    call.input =
        bytes_at(without_overlap(job, input, all, flat + bytes * static_cast<size_t>(slot.rank)));
    call.output = flat;
  }
  job.calls.push_back(call);
  return job;
}

inline Job gather_lists(RankSlot slot, const std::vector<Tensors>& outputs, const Tensors& inputs,
                        const c10d::GatherOptions& opts) {
  const Job blank{.type = c10d::OpType::GATHER, .title = "pycomm:gather"};
  if (slot.rank != opts.rootRank && !outputs.empty())
    blank.throw_invalid("only the root may pass outputs");
  return gather(slot, only(blank, inputs), opts, [&](Job& job, const at::Tensor& input) {
    job.outputs = roots_list(job, slot, outputs, input);
    return gathered(job, job.outputs);
  });
}

inline Job gather_into(RankSlot slot, const at::Tensor& output, const at::Tensor& input,
                       const c10d::GatherOptions& opts) {
  return gather(slot, input, opts, [&](Job& job, const at::Tensor& plain) {
    check_elements(job, output, plain, plain.numel() * slot.size);
    job.outputs = {output};
    return bytes_at(writable(job, output, Values::unused));
  });
}

inline Job scatter(RankSlot slot, const Tensors& outputs, const std::vector<Tensors>& inputs,
                   const c10d::ScatterOptions& opts) {
  Job job{.type = c10d::OpType::SCATTER, .title = "pycomm:scatter", .outputs = outputs};
  at::Tensor output = writable(job, only(job, outputs), Values::unused);
  check_root(job, slot, opts.rootRank);
  group::Call call = moving(Operation::scatter, output);
  call.peer = static_cast<int>(opts.rootRank);
  if (slot.rank == call.peer) {
    job.inputs = roots_list(job, slot, inputs, output);
    const at::Tensor flat = flattened(job, job.inputs);
    output = without_overlap(job, output, flat, slot);
    call.input = bytes_at(flat);
  } else if (inputs.empty()) {
    job.inputs = outputs;
  } else {
    job.throw_invalid("only the root may pass inputs");
  }
  call.output = bytes_at(output);
  job.calls.push_back(call);
  return job;
}

// `counts`: elements sent to each rank, then received from each; empty: equal for all.
inline void add_all_to_all(Job& job, RankSlot slot, MemoryRange output, const at::Tensor& input,
                           std::vector<size_t> counts) {
  group::Call call = moving(Operation::all_to_all, input);
  call.input = bytes_at(without_overlap(job, input, output, nullptr));
  call.output = output.begin;
  call.count = counts.empty() ? call.count / static_cast<size_t>(slot.size) : 0;
  call.counts = std::move(counts);
  job.calls.push_back(std::move(call));
}

inline Job all_to_all(RankSlot slot, const Tensors& outputs, const Tensors& inputs) {
  Job job{.type = c10d::OpType::ALLTOALL,
          .title = "pycomm:all_to_all",
          .inputs = inputs,
          .outputs = outputs};
  const auto size = static_cast<size_t>(slot.size);
  if (outputs.size() != size || inputs.size() != size)
    job.throw_invalid("requires " + std::to_string(size) + " inputs and as many outputs");
  for (const Tensors* list : {&inputs, &outputs})
    for (const auto& tensor : *list) {
      check_place(job, tensor);
      check_elements(job, tensor, inputs.front(), tensor.numel());
    }
  const auto own = static_cast<size_t>(slot.rank);
  check_elements(job, outputs[own], inputs[own], inputs[own].numel());
  std::vector<size_t> counts = counts_of(inputs);
  const std::vector<size_t> back = counts_of(outputs);
  counts.insert(counts.end(), back.begin(), back.end());
  const at::Tensor from = flattened(job, inputs);
  char* const to = gathered(job, outputs);
  size_t bytes = 0;
  for (const auto& output : outputs) bytes += output.nbytes();
  add_all_to_all(job, slot, {to, to + bytes}, from, std::move(counts));
  return job;
}

// Elements for each rank: the rows given by `splits` or, if it is empty, equal shares.
inline void add_counts(std::vector<size_t>& counts, const Job& job, RankSlot slot,
                       const at::Tensor& tensor, const std::vector<int64_t>& splits) {
  if (tensor.dim() == 0) job.throw_invalid("a tensor without dimensions has no rows to split");
  const int64_t rows = tensor.size(0);
  std::vector<int64_t> sizes = splits;
  if (splits.empty()) sizes.assign(static_cast<size_t>(slot.size), rows / slot.size);
  if (sizes.size() != static_cast<size_t>(slot.size) ||
      std::any_of(sizes.begin(), sizes.end(), [](int64_t n) { return n < 0; }) ||
      std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) != rows)
    job.throw_invalid("the " + std::to_string(rows) + " rows of a tensor differ from the sum of " +
                      std::to_string(slot.size) + " splits");
  const int64_t width = rows == 0 ? 0 : tensor.numel() / rows;
  for (const int64_t size : sizes)
    counts.push_back(static_cast<size_t>(size * width) * moved_as(tensor).parts);
}

inline Job all_to_all_rows(RankSlot slot, const at::Tensor& output, const at::Tensor& input,
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
  add_counts(counts, job, slot, from, input_splits);
  add_counts(counts, job, slot, to, output_splits);
  if (input_splits.empty() && output_splits.empty()) {
    check_elements(job, to, from, from.numel());
    counts.clear();
  }
  add_all_to_all(job, slot, memory_of(to), from, std::move(counts));
  return job;
}

}  // namespace pycomm::bindings
