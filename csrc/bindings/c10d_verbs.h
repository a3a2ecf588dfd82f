// What each verb of torch's means in calls of the engine: tensors in, a Job out.
//
// Pure but for the copies that a layout needs: nothing is sent here. Verbs that the engine does not
// have (gather, scatter, all-to-all) are sends and receives. Included by c10d.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "bindings/c10d_tensors.h"

namespace pycomm::bindings {

using Tensors = std::vector<at::Tensor>;

// Who asks.
struct Seat {
  int rank;
  int size;
};

inline const at::Tensor& only(const Job& job, const Tensors& tensors) {
  if (tensors.size() != 1) job.refuse("takes one tensor, got " + std::to_string(tensors.size()));
  return tensors.front();
}

inline void check_elements(const Job& job, const at::Tensor& got, const at::Tensor& like,
                           int64_t count) {
  if (got.scalar_type() != like.scalar_type())
    job.refuse(std::string("tensors of ") + c10::toString(got.scalar_type()) + " and " +
               c10::toString(like.scalar_type()) + " in one call");
  if (got.numel() != count)
    job.refuse("a tensor of " + std::to_string(got.numel()) + " elements where " +
               std::to_string(count) + " are needed");
}

inline void check_root(const Job& job, Seat seat, int64_t root, int64_t root_tensor = 0) {
  if (root < 0 || root >= seat.size || root_tensor != 0)
    job.refuse("root " + std::to_string(root) + " is no rank of a group of " +
               std::to_string(seat.size));
}

inline Call moving(Operation operation, const at::Tensor& tensor) {
  const Element element = moved_as(tensor);
  return {.operation = operation,
          .dtype = element.dtype,
          .count = static_cast<size_t>(tensor.numel()) * element.parts};
}

inline Call reducing(const Job& job, Operation operation, const at::Tensor& tensor,
                     const c10d::ReduceOp& op) {
  const Element element = reduced_as(job, tensor, op);
  return {.operation = operation,
          .dtype = element.dtype,
          .op = engine_op(job, op),
          .count = static_cast<size_t>(tensor.numel()) * element.parts};
}

// `plain` or, for PREMUL_SUM, a scaled copy of it.
inline at::Tensor scaled(Job& job, const at::Tensor& plain, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return plain;
  BelowAutograd guard;
  const auto& factor = static_cast<const c10d::PreMulSumSupplement&>(*op.supplement_);
  const at::Tensor product =
      factor.tensor_factor.defined() ? plain * factor.tensor_factor : plain * factor.double_factor;
  job.held.push_back(product.to(plain.scalar_type()));
  return job.held.back();
}

inline void add_all_reduce(Job& job, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const at::Tensor out = writable(job, tensor, Values::kept);
  Call call = reducing(job, Operation::all_reduce, out, op);
  call.output = bytes_at(out);
  call.input = bytes_at(scaled(job, out, op));
  job.calls.push_back(call);
}

inline Job all_reduce(const Tensors& tensors, const c10d::ReduceOp& op, c10d::OpType type) {
  Job job{.type = type, .title = "pycomm:all_reduce", .inputs = tensors, .outputs = tensors};
  for (const auto& tensor : tensors) add_all_reduce(job, tensor, op);
  return job;
}

// An all-reduce whose result all but the root throw away.
inline Job reduce(Seat seat, const Tensors& tensors, const c10d::ReduceOptions& opts) {
  Job job{c10d::OpType::REDUCE, "pycomm:reduce", tensors, tensors};
  const at::Tensor& tensor = only(job, tensors);
  check_root(job, seat, opts.rootRank, opts.rootTensor);
  if (seat.rank == opts.rootRank) {
    add_all_reduce(job, tensor, opts.reduceOp);
    return job;
  }
  const at::Tensor in = scaled(job, readable(job, tensor), opts.reduceOp);
  job.held.push_back(at::empty(in.sizes(), in.options()));
  Call call = reducing(job, Operation::all_reduce, in, opts.reduceOp);
  call.input = bytes_at(in);
  call.output = bytes_at(job.held.back());
  job.calls.push_back(call);
  return job;
}

inline Job broadcast(Seat seat, const Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Job job{c10d::OpType::BROADCAST, "pycomm:broadcast", tensors, tensors};
  const at::Tensor& tensor = only(job, tensors);
  check_root(job, seat, opts.rootRank, opts.rootTensor);
  const at::Tensor plain =
      seat.rank == opts.rootRank ? readable(job, tensor) : writable(job, tensor, Values::unused);
  Call call = moving(Operation::broadcast, plain);
  call.output = bytes_at(plain);
  call.peer = static_cast<int>(opts.rootRank);
  job.calls.push_back(call);
  return job;
}

// One array for all of `outputs`: their own memory if it is one, else a stand-in.
inline char* gathered(Job& job, const Tensors& outputs) {
  for (const auto& output : outputs)
    if (!is_free_of_overlap(output)) job.refuse("elements of an output share memory");
  if (are_pieces_of_one(outputs)) return bytes_at(outputs.front());
  const int64_t count = outputs.front().numel();
  const auto size = static_cast<int64_t>(outputs.size());
  const at::Tensor flat = at::empty({count * size}, outputs.front().options());
  for (int64_t i = 0; i < size; ++i)
    job.copies.emplace_back(outputs[static_cast<size_t>(i)], flat.narrow(0, i * count, count));
  return bytes_at(flat);
}

// A plain input that does not share memory with the output, but for this rank's place in it.
inline at::Tensor apart(Job& job, const at::Tensor& input, Memory output, Seat seat) {
  if (!share(memory_of(input), output) ||
      bytes_at(input) == output.begin + static_cast<size_t>(seat.rank) * input.nbytes())
    return input;
  job.held.push_back(input.clone());
  return job.held.back();
}

inline void add_all_gather(Job& job, const at::Tensor& input, char* output) {
  Call call = moving(Operation::all_gather, input);
  call.input = bytes_at(input);
  call.output = output;
  job.calls.push_back(call);
}

inline void add_all_gather(Job& job, Seat seat, const Tensors& outputs, const at::Tensor& input) {
  if (outputs.size() != static_cast<size_t>(seat.size))
    job.refuse("takes " + std::to_string(seat.size) + " outputs for an input, one for each rank");
  const at::Tensor plain = readable(job, input);
  for (const auto& output : outputs) {
    check_place(job, output);
    check_elements(job, output, plain, plain.numel());
  }
  char* const flat = gathered(job, outputs);
  const size_t all = plain.nbytes() * outputs.size();
  add_all_gather(job, apart(job, plain, {flat, flat + all}, seat), flat);
  job.outputs.insert(job.outputs.end(), outputs.begin(), outputs.end());
}

inline Job all_gather(Seat seat, const std::vector<Tensors>& outputs, const Tensors& inputs) {
  Job job{.type = c10d::OpType::ALLGATHER, .title = "pycomm:all_gather", .inputs = inputs};
  if (outputs.size() != 1) job.refuse("takes one list of outputs");
  add_all_gather(job, seat, outputs.front(), only(job, inputs));
  return job;
}

// outputs[r][i] is what rank r has for inputs[i].
inline Job all_gather_lists(Seat seat, const std::vector<Tensors>& outputs, const Tensors& inputs) {
  Job job{
      .type = c10d::OpType::ALLGATHER_COALESCED, .title = "pycomm:all_gather", .inputs = inputs};
  for (const auto& of_rank : outputs)
    if (of_rank.size() != inputs.size()) job.refuse("needs one output for each input and rank");
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_input;
    for (const auto& of_rank : outputs) of_input.push_back(of_rank[i]);
    add_all_gather(job, seat, of_input, inputs[i]);
  }
  return job;
}

inline Job all_gather_into(Seat seat, const Tensors& outputs, const Tensors& inputs,
                           c10d::OpType type) {
  Job job{.type = type, .title = "pycomm:all_gather", .inputs = inputs, .outputs = outputs};
  if (outputs.size() != inputs.size()) job.refuse("needs one output for each input");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_place(job, outputs[i]);
    const at::Tensor input = readable(job, inputs[i]);
    check_elements(job, outputs[i], input, input.numel() * seat.size);
    const at::Tensor output = writable(job, outputs[i], Values::unused);
    add_all_gather(job, apart(job, input, memory_of(output), seat), bytes_at(output));
  }
  return job;
}

inline void add_reduce_scatter(Job& job, Seat seat, const at::Tensor& output,
                               const at::Tensor& input, const c10d::ReduceOp& op) {
  check_elements(job, input, output, output.numel() * seat.size);
  const at::Tensor in = scaled(job, input, op);
  at::Tensor out = writable(job, output, Values::unused);
  if (share(memory_of(out), memory_of(in)) &&
      bytes_at(out) != bytes_at(in) + static_cast<size_t>(seat.rank) * out.nbytes()) {
    const at::Tensor stand_in = at::empty(out.sizes(), out.options());
    job.copies.emplace(job.copies.begin(), out, stand_in);  // before `out` itself is copied
    out = stand_in;
  }
  Call call = reducing(job, Operation::reduce_scatter, out, op);
  call.input = bytes_at(in);
  call.output = bytes_at(out);
  job.calls.push_back(call);
}

inline Job reduce_scatter(Seat seat, const Tensors& outputs, const std::vector<Tensors>& inputs,
                          const c10d::ReduceOp& op) {
  Job job{
      .type = c10d::OpType::REDUCE_SCATTER, .title = "pycomm:reduce_scatter", .outputs = outputs};
  const at::Tensor& output = only(job, outputs);
  check_place(job, output);
  if (inputs.size() != 1 || inputs.front().size() != static_cast<size_t>(seat.size))
    job.refuse("takes one list of " + std::to_string(seat.size) + " inputs, one for each rank");
  job.inputs = inputs.front();
  BelowAutograd guard;
  job.held.push_back(at::empty({output.numel() * seat.size}, output.options()));
  const at::Tensor flat = job.held.back();
  for (int64_t i = 0; i < seat.size; ++i) {
    const at::Tensor& input = job.inputs[static_cast<size_t>(i)];
    check_place(job, input);
    check_elements(job, input, output, output.numel());
    flat.narrow(0, i * output.numel(), output.numel()).view(input.sizes()).copy_(input);
  }
  add_reduce_scatter(job, seat, output, flat, op);
  return job;
}

inline Job reduce_scatter_from(Seat seat, const Tensors& outputs, const Tensors& inputs,
                               const c10d::ReduceOp& op, c10d::OpType type) {
  Job job{.type = type, .title = "pycomm:reduce_scatter", .inputs = inputs, .outputs = outputs};
  if (outputs.size() != inputs.size()) job.refuse("needs one output for each input");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_place(job, outputs[i]);
    add_reduce_scatter(job, seat, outputs[i], readable(job, inputs[i]), op);
  }
  return job;
}

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

// Tags of the verbs that are made of sends; torch's own are below 2^31.
inline uint32_t verb_tag(const Job& job) { return (1U << 31) + static_cast<uint32_t>(job.type); }

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

// What stays on this rank is copied, after the transfers.
inline void add_own(Job& job, const at::Tensor& to, const at::Tensor& from) {
  check_place(job, to);
  check_elements(job, to, from, from.numel());
  if (!is_free_of_overlap(to)) job.refuse("elements of an output share memory");
  job.copies.emplace_back(to, readable(job, from));
}

inline Job gather(Seat seat, const std::vector<Tensors>& outputs, const Tensors& inputs,
                  const c10d::GatherOptions& opts) {
  Job job{.type = c10d::OpType::GATHER, .title = "pycomm:gather", .inputs = inputs};
  const at::Tensor& input = only(job, inputs);
  check_root(job, seat, opts.rootRank);
  const int root = static_cast<int>(opts.rootRank);
  if (seat.rank != root) {
    if (!outputs.empty()) job.refuse("only the root takes outputs");
    add_send(job, input, root, verb_tag(job));
    return job;
  }
  if (outputs.size() != 1 || outputs.front().size() != static_cast<size_t>(seat.size))
    job.refuse("the root takes one list of " + std::to_string(seat.size) + " outputs");
  job.outputs = outputs.front();
  for (int peer = 0; peer < seat.size; ++peer) {
    const at::Tensor& output = job.outputs[static_cast<size_t>(peer)];
    check_elements(job, output, input, input.numel());
    if (peer == root)
      add_own(job, output, input);
    else
      add_recv(job, output, peer, verb_tag(job));
  }
  return job;
}

inline Job scatter(Seat seat, const Tensors& outputs, const std::vector<Tensors>& inputs,
                   const c10d::ScatterOptions& opts) {
  Job job{.type = c10d::OpType::SCATTER, .title = "pycomm:scatter", .outputs = outputs};
  const at::Tensor& output = only(job, outputs);
  check_root(job, seat, opts.rootRank);
  const int root = static_cast<int>(opts.rootRank);
  if (seat.rank != root) {
    if (!inputs.empty()) job.refuse("only the root takes inputs");
    job.inputs = outputs;
    add_recv(job, output, root, verb_tag(job));
    return job;
  }
  if (inputs.size() != 1 || inputs.front().size() != static_cast<size_t>(seat.size))
    job.refuse("the root takes one list of " + std::to_string(seat.size) + " inputs");
  job.inputs = inputs.front();
  for (int peer = 0; peer < seat.size; ++peer) {
    const at::Tensor& input = job.inputs[static_cast<size_t>(peer)];
    check_elements(job, input, output, output.numel());
    if (peer == root)
      add_own(job, output, input);
    else
      add_send(job, input, peer, verb_tag(job));
  }
  return job;
}

inline Job all_to_all(Seat seat, const Tensors& outputs, const Tensors& inputs, c10d::OpType type) {
  Job job{.type = type, .title = "pycomm:all_to_all", .inputs = inputs, .outputs = outputs};
  const auto size = static_cast<size_t>(seat.size);
  if (outputs.size() != size || inputs.size() != size)
    job.refuse("takes " + std::to_string(size) + " inputs and as many outputs");
  for (int peer = 0; peer < seat.size; ++peer) {
    const auto& output = outputs[static_cast<size_t>(peer)];
    const auto& input = inputs[static_cast<size_t>(peer)];
    check_elements(job, input, output, input.numel());
    if (peer == seat.rank) {
      add_own(job, output, input);
    } else {
      add_send(job, input, peer, verb_tag(job));
      add_recv(job, output, peer, verb_tag(job));
    }
  }
  sort_transfers(job.calls, seat.rank);
  return job;
}

// Rows of `tensor` for each rank: as many as `splits` says or, where it is empty, as many for each.
inline Tensors pieces(const Job& job, Seat seat, const at::Tensor& tensor,
                      const std::vector<int64_t>& splits) {
  check_place(job, tensor);
  if (!is_free_of_overlap(tensor)) job.refuse("elements of a tensor share memory; pass a clone()");
  const int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  std::vector<int64_t> sizes = splits;
  if (splits.empty()) sizes.assign(static_cast<size_t>(seat.size), rows / seat.size);
  if (sizes.size() != static_cast<size_t>(seat.size) ||
      std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) != rows)
    job.refuse("the " + std::to_string(rows) + " rows of a tensor are not what " +
               std::to_string(seat.size) + " splits add up to");
  return tensor.split_with_sizes(sizes, 0);
}

inline Job all_to_all_rows(Seat seat, const at::Tensor& output, const at::Tensor& input,
                           const std::vector<int64_t>& output_splits,
                           const std::vector<int64_t>& input_splits) {
  const Job refusing{.type = c10d::OpType::ALLTOALL_BASE, .title = "pycomm:all_to_all"};
  const Tensors to = pieces(refusing, seat, output, output_splits);
  Tensors from = pieces(refusing, seat, input, input_splits);
  if (output.storage().is_alias_of(input.storage()))
    from = pieces(refusing, seat, input.clone(), input_splits);
  Job job = all_to_all(seat, to, from, refusing.type);
  job.inputs = {input};
  job.outputs = {output};
  return job;
}

}  // namespace pycomm::bindings
