// Maps torch's verbs to calls of the engine: tensors in, a Job out.
//
// Pure except for copies of layouts: nothing is sent here. c10d_exchange.h has the verbs in which
// ranks send each other different data (gather, scatter, all-to-all, messages).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings/c10d_overlap.h"
#include "bindings/c10d_tensors.h"

namespace pycomm::bindings {

using Tensors = std::vector<at::Tensor>;

// The calling rank and the group's size.
struct RankSlot {
  int rank;
  int size;
};

inline const at::Tensor& only(const Job& job, const Tensors& tensors) {
  if (tensors.size() != 1)
    job.throw_invalid("requires one tensor, got " + std::to_string(tensors.size()));
  return tensors.front();
}

inline void check_elements(const Job& job, const at::Tensor& got, const at::Tensor& like,
                           int64_t count) {
  if (got.scalar_type() != like.scalar_type())
    job.throw_invalid(std::string("tensors of ") + c10::toString(got.scalar_type()) + " and " +
                      c10::toString(like.scalar_type()) + " in one call");
  if (got.numel() != count)
    job.throw_invalid("a tensor has " + std::to_string(got.numel()) + " elements, expected " +
                      std::to_string(count));
}

inline void check_root(const Job& job, RankSlot slot, int64_t root, int64_t root_tensor = 0) {
  if (root < 0 || root >= slot.size || root_tensor != 0)
    job.throw_invalid("invalid root " + std::to_string(root) + " in a group of " +
                      std::to_string(slot.size));
}

inline group::Call moving(Operation operation, const at::Tensor& tensor) {
  const Element element = moved_as(tensor);
  return {.operation = operation,
          .dtype = element.dtype,
          .count = static_cast<size_t>(tensor.numel()) * element.parts};
}

inline group::Call reducing(const Job& job, Operation operation, const at::Tensor& tensor,
                            const c10d::ReduceOp& op) {
  const Element element = reduced_as(job, tensor, op);
  return {.operation = operation,
          .dtype = element.dtype,
          .op = engine_op(job, op),
          .count = static_cast<size_t>(tensor.numel()) * element.parts};
}

// A list whose tensors are separate calls: one dtype, not empty.
inline void check_list(Job& job, const Tensors& tensors) {
  if (tensors.empty()) job.throw_invalid("got an empty list; pass at least one tensor");
  for (const auto& tensor : tensors) {
    check_place(job, tensor);
    check_elements(job, tensor, tensors.front(), tensor.numel());
  }
}

// The memory uses of the calls of a list, by index.
inline void add_uses(std::vector<Use>& uses, const Tensors& tensors, bool written) {
  for (size_t i = 0; i < tensors.size(); ++i) uses.push_back({tensors[i], i, written});
}

// The memory uses of a whole job, which is call `call` of a batch.
inline void add_uses(std::vector<Use>& uses, const Job& job, size_t call) {
  const bool writes = job.type != c10d::OpType::SEND;  // its outputs are its inputs
  for (const auto& input : job.inputs) uses.push_back({input, call, false});
  for (const auto& output : job.outputs) uses.push_back({output, call, writes});
}

// Calls of a batch are unordered, so an overlap would make what a call reads undefined.
inline void check_no_overlap(const Job& batch, const std::vector<Use>& uses) {
  if (MemoryOverlap::is_written_twice(uses))
    batch.throw_invalid(
        "one call writes memory that another call reads or writes; pass tensors that do not "
        "overlap, or make the calls one after another");
}

// One output for each input; each pair is a call.
inline void check_pairs(Job& job, const Tensors& outputs, const Tensors& inputs) {
  if (outputs.size() != inputs.size()) job.throw_invalid("requires one output for each input");
  check_list(job, inputs);
  check_list(job, outputs);
  check_elements(job, outputs.front(), inputs.front(), outputs.front().numel());
  if (outputs.size() == 1) return;
  std::vector<Use> uses;
  add_uses(uses, outputs, true);
  add_uses(uses, inputs, false);
  job.staged = MemoryOverlap::is_written_twice(uses);
}

// torch 2.11 has no type of its own for coalesced reduce_scatter calls.
template <class Type = c10d::OpType>
constexpr Type reduce_scatter_coalesced_type() {
  if constexpr (requires { Type::REDUCE_SCATTER_TENSOR_COALESCED; })
    return Type::REDUCE_SCATTER_TENSOR_COALESCED;
  else
    return Type::_REDUCE_SCATTER_BASE;
}

// `plain` or, for PREMUL_SUM, a scaled copy. Integers are multiplied exactly, modulo 2^bits.
inline at::Tensor scaled(Job& job, const at::Tensor& plain, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return plain;
  BelowAutograd guard;
  // The name that torch 2.11 uses; in later versions it is an alias.
  const auto& factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
  const auto& tensor = factor.tensor_factor;
  const double number = factor.double_factor;
  constexpr double kExact = 1LL << 53;
  const auto type = plain.scalar_type();
  at::Tensor product;
  if (!c10::isIntegralType(type, true)) {
    product = tensor.defined() ? plain * tensor : plain * number;
  } else if (type == at::kBool ||
             (tensor.defined() && !c10::isIntegralType(tensor.scalar_type(), false)) ||
             (!tensor.defined() && !(std::trunc(number) == number && std::abs(number) <= kExact))) {
    job.throw_unsupported(std::string("PREMUL_SUM of ") + c10::toString(type) +
                          " requires an integer as factor, and integers that are not bool");
  } else {
    const at::Tensor wide = plain.to(at::kLong);
    product = tensor.defined() ? wide * tensor.to(at::kLong) : wide * static_cast<int64_t>(number);
  }
  job.held.push_back(product.to(type));
  return job.held.back();
}

inline void add_all_reduce(Job& job, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const at::Tensor out = writable(job, tensor, Values::kept);
  group::Call call = reducing(job, Operation::all_reduce, out, op);
  call.output = bytes_at(out);
  call.input = bytes_at(scaled(job, out, op));
  job.calls.push_back(call);
}

inline Job all_reduce(const Tensors& tensors, const c10d::ReduceOp& op, c10d::OpType type) {
  Job job{.type = type, .title = "pycomm:all_reduce", .inputs = tensors, .outputs = tensors};
  check_list(job, tensors);
  if (tensors.size() > 1) {
    std::vector<Use> uses;
    add_uses(uses, tensors, true);
    job.staged = MemoryOverlap::is_written_twice(uses);
  }
  for (const auto& tensor : tensors) add_all_reduce(job, tensor, op);
  return job;
}

inline void add_reduce(Job& job, RankSlot slot, const at::Tensor& tensor, const c10d::ReduceOp& op,
                       int root) {
  const bool is_root = slot.rank == root;
  const at::Tensor plain = is_root ? writable(job, tensor, Values::kept) : readable(job, tensor);
  group::Call call = reducing(job, Operation::reduce, plain, op);
  call.input = bytes_at(scaled(job, plain, op));
  if (is_root) call.output = bytes_at(plain);
  call.peer = root;
  job.calls.push_back(call);
}

inline Job reduce(RankSlot slot, const Tensors& tensors, const c10d::ReduceOptions& opts) {
  Job job{c10d::OpType::REDUCE, "pycomm:reduce", tensors, tensors};
  const at::Tensor& tensor = only(job, tensors);
  check_root(job, slot, opts.rootRank, opts.rootTensor);
  add_reduce(job, slot, tensor, opts.reduceOp, static_cast<int>(opts.rootRank));
  return job;
}

inline Job broadcast(RankSlot slot, const Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Job job{c10d::OpType::BROADCAST, "pycomm:broadcast", tensors, tensors};
  const at::Tensor& tensor = only(job, tensors);
  check_root(job, slot, opts.rootRank, opts.rootTensor);
  const at::Tensor plain =
      slot.rank == opts.rootRank ? readable(job, tensor) : writable(job, tensor, Values::unused);
  group::Call call = moving(Operation::broadcast, plain);
  call.output = bytes_at(plain);
  call.peer = static_cast<int>(opts.rootRank);
  job.calls.push_back(call);
  return job;
}

// One array for all `outputs`: their own memory if they are adjacent, otherwise a temporary.
inline char* gathered(Job& job, const Tensors& outputs) {
  int64_t all = 0;
  for (const auto& output : outputs) {
    if (!is_free_of_overlap(output)) job.throw_invalid("elements of an output share memory");
    all += output.numel();
  }
  if (are_pieces_of_one(outputs) && !job.staged) return bytes_at(outputs.front());
  const at::Tensor flat = at::empty({all}, outputs.front().options());
  int64_t begin = 0;
  for (const auto& output : outputs) {
    job.copies.emplace_back(output, flat.narrow(0, begin, output.numel()));
    begin += output.numel();
  }
  return bytes_at(flat);
}

// One array of all `inputs`: their own memory if they are adjacent, otherwise a copy that the job
// holds.
inline at::Tensor flattened(Job& job, const Tensors& inputs) {
  BelowAutograd guard;
  int64_t all = 0;
  for (const auto& input : inputs) all += input.numel();
  if (are_pieces_of_one(inputs)) return inputs.front().as_strided({all}, {1});
  const at::Tensor flat = at::empty({all}, inputs.front().options());
  int64_t begin = 0;
  for (const auto& input : inputs) {
    flat.narrow(0, begin, input.numel()).view(input.sizes()).copy_(input);
    begin += input.numel();
  }
  job.held.push_back(flat);
  return flat;
}

// A contiguous input that does not overlap the output, except for this rank's block of it.
inline at::Tensor without_overlap(Job& job, const at::Tensor& input, MemoryRange output,
                                  const char* place) {
  if (!share(memory_of(input), output) || bytes_at(input) == place) return input;
  job.held.push_back(input.clone());
  return job.held.back();
}

// A contiguous output that does not overlap the input, except for this rank's block of it.
inline at::Tensor without_overlap(Job& job, const at::Tensor& output, const at::Tensor& input,
                                  RankSlot slot) {
  if (!share(memory_of(output), memory_of(input)) ||
      bytes_at(output) == bytes_at(input) + static_cast<size_t>(slot.rank) * output.nbytes())
    return output;
  const at::Tensor stand_in = at::empty(output.sizes(), output.options());
  job.copies.emplace(job.copies.begin(), output, stand_in);  // before `output` itself is copied
  return stand_in;
}

inline void add_all_gather(Job& job, const at::Tensor& input, char* output) {
  group::Call call = moving(Operation::all_gather, input);
  call.input = bytes_at(input);
  call.output = output;
  job.calls.push_back(call);
}

// Engine elements in each of the adjacent `tensors`.
inline std::vector<size_t> counts_of(const Tensors& tensors) {
  std::vector<size_t> counts;
  for (const auto& tensor : tensors)
    counts.push_back(static_cast<size_t>(tensor.numel()) * moved_as(tensor).parts);
  return counts;
}

inline bool are_equal(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == tensors.front().numel();
  });
}

// The outputs may differ in size, alike on all ranks.
inline void add_all_gather(Job& job, RankSlot slot, const Tensors& outputs,
                           const at::Tensor& input) {
  if (outputs.size() != static_cast<size_t>(slot.size))
    job.throw_invalid("requires " + std::to_string(slot.size) +
                      " outputs per input, one for each rank");
  const at::Tensor plain = readable(job, input);
  for (const auto& output : outputs) {
    check_place(job, output);
    check_elements(job, output, plain, output.numel());
  }
  check_elements(job, plain, plain, outputs[static_cast<size_t>(slot.rank)].numel());
  char* const flat = gathered(job, outputs);
  size_t begin = 0, all = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (i == static_cast<size_t>(slot.rank)) begin = all;
    all += outputs[i].nbytes();
  }
  add_all_gather(job, without_overlap(job, plain, {flat, flat + all}, flat + begin), flat);
  if (!are_equal(outputs)) {
    job.calls.back().counts = counts_of(outputs);
    job.calls.back().count = 0;
  }
  job.outputs.insert(job.outputs.end(), outputs.begin(), outputs.end());
}

inline Job all_gather(RankSlot slot, const std::vector<Tensors>& outputs, const Tensors& inputs) {
  Job job{.type = c10d::OpType::ALLGATHER, .title = "pycomm:all_gather", .inputs = inputs};
  if (outputs.size() != 1) job.throw_invalid("requires one list of outputs");
  add_all_gather(job, slot, outputs.front(), only(job, inputs));
  return job;
}

// outputs[r][i] is inputs[i] of rank r.
inline Job all_gather_lists(RankSlot slot, const std::vector<Tensors>& outputs,
                            const Tensors& inputs) {
  Job job{
      .type = c10d::OpType::ALLGATHER_COALESCED, .title = "pycomm:all_gather", .inputs = inputs};
  for (const auto& of_rank : outputs)
    if (of_rank.size() != inputs.size())
      job.throw_invalid("requires one output for each input and rank");
  check_list(job, inputs);
  std::vector<Use> uses;
  add_uses(uses, inputs, false);
  for (const auto& of_rank : outputs) {
    check_list(job, of_rank);
    add_uses(uses, of_rank, true);
  }
  job.staged = MemoryOverlap::is_written_twice(uses);
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors of_input;
    for (const auto& of_rank : outputs) of_input.push_back(of_rank[i]);
    add_all_gather(job, slot, of_input, inputs[i]);
  }
  return job;
}

inline Job all_gather_into(RankSlot slot, const Tensors& outputs, const Tensors& inputs,
                           c10d::OpType type) {
  Job job{.type = type, .title = "pycomm:all_gather", .inputs = inputs, .outputs = outputs};
  check_pairs(job, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_place(job, outputs[i]);
    const at::Tensor input = readable(job, inputs[i]);
    check_elements(job, outputs[i], input, input.numel() * slot.size);
    const at::Tensor output = writable(job, outputs[i], Values::unused);
    const char* const place = bytes_at(output) + static_cast<size_t>(slot.rank) * input.nbytes();
    add_all_gather(job, without_overlap(job, input, memory_of(output), place), bytes_at(output));
  }
  return job;
}

inline void add_reduce_scatter(Job& job, RankSlot slot, const at::Tensor& output,
                               const at::Tensor& input, const c10d::ReduceOp& op) {
  check_elements(job, input, output, output.numel() * slot.size);
  const at::Tensor in = scaled(job, input, op);
  const at::Tensor out = without_overlap(job, writable(job, output, Values::unused), in, slot);
  group::Call call = reducing(job, Operation::reduce_scatter, out, op);
  call.input = bytes_at(in);
  call.output = bytes_at(out);
  job.calls.push_back(call);
}

// For inputs that differ in size, alike on all ranks: one reduce per input.
inline void add_reduces(Job& job, RankSlot slot, const at::Tensor& output,
                        const c10d::ReduceOp& op) {
  if (!is_free_of_overlap(output)) job.throw_invalid("elements of the output share memory");
  for (int root = 0; root < slot.size; ++root) {
    at::Tensor input = job.inputs[static_cast<size_t>(root)];
    if (root == slot.rank) {
      BelowAutograd guard;
      input = input.clone(at::MemoryFormat::Contiguous);
      job.copies.emplace_back(output, input);
    }
    add_reduce(job, slot, input, op, root);
  }
}

inline Job reduce_scatter(RankSlot slot, const Tensors& outputs, const std::vector<Tensors>& inputs,
                          const c10d::ReduceOp& op) {
  Job job{
      .type = c10d::OpType::REDUCE_SCATTER, .title = "pycomm:reduce_scatter", .outputs = outputs};
  const at::Tensor& output = only(job, outputs);
  check_place(job, output);
  if (inputs.size() != 1 || inputs.front().size() != static_cast<size_t>(slot.size))
    job.throw_invalid("requires one list of " + std::to_string(slot.size) +
                      " inputs, one for each rank");
  job.inputs = inputs.front();
  for (const auto& input : job.inputs) {
    check_place(job, input);
    check_elements(job, input, output, input.numel());
  }
  check_elements(job, output, output, job.inputs[static_cast<size_t>(slot.rank)].numel());
  if (are_equal(job.inputs)) {
    add_reduce_scatter(job, slot, output, flattened(job, job.inputs), op);
  } else {
    add_reduces(job, slot, output, op);
  }
  return job;
}

inline Job reduce_scatter_from(RankSlot slot, const Tensors& outputs, const Tensors& inputs,
                               const c10d::ReduceOp& op, c10d::OpType type) {
  Job job{.type = type, .title = "pycomm:reduce_scatter", .inputs = inputs, .outputs = outputs};
  check_pairs(job, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_place(job, outputs[i]);
    add_reduce_scatter(job, slot, outputs[i], readable(job, inputs[i]), op);
  }
  return job;
}

}  // namespace pycomm::bindings
