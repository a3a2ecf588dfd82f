// Torch tensors as arrays of the engine: dtype, memory and the copies around a call.
//
// Everything here runs before any data is sent, so every error is a usage error and leaves the
// group usable.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "bindings/contiguous_array.h"
#include "group/group.h"

namespace pycomm::bindings {

// One torch verb, ready for the engine: calls in order, then what depends on their results, then
// copies. `held` keeps memory alive that only the calls use.
struct Job {
  c10d::OpType type;
  const char* title;  // for the profiler: "pycomm:" and the verb
  std::vector<at::Tensor> inputs{};
  std::vector<at::Tensor> outputs{};  // the value of the future
  c10::SmallVector<group::Call, 1> calls{};
  std::vector<at::Tensor> held{};
  // Further calls, made when the job's only call is complete; `timeout` is that call's.
  std::function<void(group::Collectives&, std::chrono::nanoseconds)> after{};
  std::vector<std::pair<at::Tensor, at::Tensor>> copies{};  // to, from
  std::shared_ptr<int> source{};                            // recv from any source: the source
  std::optional<c10::Device> device{};                      // of its tensors, if it has any
  // Calls of the job overlap in memory that one of them writes. So none writes into the caller's
  // tensors, which get the results in order when all calls are complete.
  bool staged = false;

  std::string verb() const { return std::string(title).substr(sizeof("pycomm:") - 1); }
  [[noreturn]] void throw_invalid(const std::string& why) const {
    throw InvalidArgument("pycomm " + verb() + ": " + why, {.op = verb()});
  }
  [[noreturn]] void throw_unsupported(const std::string& what) const {
    throw Unsupported("pycomm " + verb() + ": " + what, {.op = verb()});
  }
};

// Disables autograd for tensor operations here; the worker has no torch state.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// An element of a tensor is `parts` elements of the engine.
struct Element {
  Dtype dtype;
  size_t parts;
};

using DtypePair = std::pair<at::ScalarType, Dtype>;
inline constexpr std::array<DtypePair, 10> kSame{{
    {at::kHalf, Dtype::float16},
    {at::kBFloat16, Dtype::bfloat16},
    {at::kFloat, Dtype::float32},
    {at::kDouble, Dtype::float64},
    {at::kChar, Dtype::int8},
    {at::kShort, Dtype::int16},
    {at::kInt, Dtype::int32},
    {at::kLong, Dtype::int64},
    {at::kByte, Dtype::uint8},
    {at::kBool, Dtype::boolean},
}};
inline constexpr std::array<DtypePair, 3> kComplexParts{{
    {at::kComplexHalf, Dtype::float16},
    {at::kComplexFloat, Dtype::float32},
    {at::kComplexDouble, Dtype::float64},
}};
// Sums, products and bit operations have the same bits for signed and unsigned integers;
// comparisons and means do not.
inline constexpr std::array<DtypePair, 3> kSigned{{
    {at::kUInt16, Dtype::int16},
    {at::kUInt32, Dtype::int32},
    {at::kUInt64, Dtype::int64},
}};

template <size_t kSize>
std::optional<Dtype> find(const std::array<DtypePair, kSize>& pairs, at::ScalarType type) {
  for (const auto& [torch, ours] : pairs)
    if (torch == type) return ours;
  return std::nullopt;
}

// For verbs that only move elements: any dtype, as bytes if necessary.
inline Element moved_as(const at::Tensor& tensor) {
  if (const auto same = find(kSame, tensor.scalar_type())) return {*same, 1};
  if (const auto part = find(kComplexParts, tensor.scalar_type())) return {*part, 2};
  return {Dtype::uint8, static_cast<size_t>(tensor.element_size())};
}

inline Element reduced_as(const Job& job, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto type = tensor.scalar_type();
  if (const auto same = find(kSame, type)) return {*same, 1};
  const auto part = find(kComplexParts, type);
  if (part && c10d::isComplexViewAsRealAllowed(op)) return {*part, 2};
  if (part)
    job.throw_unsupported("complex tensors support sum and avg only; use torch.view_as_real");
  const bool by_bits = op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::PRODUCT ||
                       op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR ||
                       op == c10d::ReduceOp::BXOR;
  if (const auto same = find(kSigned, type); same && by_bits) return {*same, 1};
  job.throw_unsupported(std::string("unsupported reduction of ") + c10::toString(type) +
                        "; convert the tensor to a dtype of the table in the docs");
}

// PREMUL_SUM is a sum of scaled tensors.
inline ReduceOp engine_op(const Job& job, const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::band;
    case c10d::ReduceOp::BOR:
      return ReduceOp::bor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::bxor;
    case c10d::ReduceOp::UNUSED:
      break;
  }
  job.throw_unsupported("unknown reduction");
}

// The bytes that the storage of a tensor with elements must have: a program may have resized it.
inline size_t storage_needed(const at::Tensor& tensor) {
  const size_t size = tensor.element_size();
  if (tensor.is_contiguous())
    return static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * size;
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), size,
                                          tensor.storage_offset());
}

// All tensors of a job must be on one device. Whether the ranks can use it is checked later.
inline void check_place(Job& job, const at::Tensor& tensor) {
  if (!tensor.defined()) job.throw_invalid("got an undefined tensor");
  if (!job.device) job.device = tensor.device();
  if (*job.device != tensor.device())
    job.throw_invalid("tensors on " + job.device->str() + " and " + tensor.device().str() +
                      " in one call");
  if (tensor.layout() != at::kStrided || tensor.is_quantized())
    job.throw_unsupported("requires dense tensors; call to_dense() or dequantize() first");
  if (tensor.numel() == 0 || !tensor.has_storage()) return;
  const size_t needed = storage_needed(tensor);
  if (tensor.storage().nbytes() < needed)
    job.throw_invalid("a tensor of " + std::to_string(needed) + " bytes has a storage of " +
                      std::to_string(tensor.storage().nbytes()));
}

// Whether no two elements share memory. True for every slice, transpose and view of a dense tensor;
// false for as_strided layouts that interleave without sharing.
inline bool is_free_of_overlap(const at::Tensor& tensor) {
  if (tensor.numel() < 2 || tensor.is_contiguous()) return true;
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // the largest offset of the dimensions so far
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

// Whether the values are stored as they are, in row-major order.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// `tensor` itself, or a contiguous copy that the job holds.
inline at::Tensor readable(Job& job, const at::Tensor& tensor) {
  check_place(job, tensor);
  if (is_plain(tensor)) return tensor;
  BelowAutograd guard;
  job.held.push_back(tensor.contiguous().resolve_conj().resolve_neg());
  return job.held.back();
}

enum class Values : uint8_t { unused, kept };

// Contiguous memory for an output: `tensor` itself, or a temporary (initialized with its values if
// they matter) that is copied back when the calls are complete.
inline at::Tensor writable(Job& job, const at::Tensor& tensor, Values values) {
  check_place(job, tensor);
  if (!is_free_of_overlap(tensor))
    job.throw_invalid("elements of the output share memory (an expanded tensor?); pass a clone()");
  if (is_plain(tensor) && !job.staged) return tensor;
  BelowAutograd guard;
  at::Tensor stand_in = at::empty(tensor.sizes(), tensor.options());
  if (values == Values::kept) stand_in.copy_(tensor);
  job.copies.emplace_back(tensor, stand_in);
  return stand_in;
}

inline char* bytes_at(const at::Tensor& plain) { return static_cast<char*>(plain.data_ptr()); }

// A TensorReader. Subclasses may store their elements elsewhere.
inline bool read_tensor(PyObject* x, ContiguousArray& array) noexcept try {
  if (!THPVariable_CheckExact(x)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(x);
  const auto dtype = find(kSame, tensor.scalar_type());
  if (!dtype || tensor.layout() != at::kStrided || !(tensor.is_cpu() || tensor.is_cuda()) ||
      !tensor.has_storage() || !is_plain(tensor))
    return false;
  const auto count = static_cast<size_t>(tensor.numel());
  if (count > 0 && tensor.storage().nbytes() < storage_needed(tensor)) return false;
  auto* const data = reinterpret_cast<std::byte*>(bytes_at(tensor));
  if (count > 0 && data == nullptr) return false;  // torch._efficientzerotensor
  array = {.data = data,
           .dtype = *dtype,
           .count = count,
           .shape = {tensor.sizes().data(), static_cast<size_t>(tensor.dim())},
           .gpu = tensor.is_cuda() ? int{tensor.get_device()} : ContiguousArray::kHost};
  return true;
} catch (const c10::Error&) {  // its data cannot be accessed
  return false;
}

struct MemoryRange {
  char* begin;
  char* end;
};
inline MemoryRange memory_of(const at::Tensor& plain) {
  return {bytes_at(plain), bytes_at(plain) + plain.nbytes()};
}
inline bool share(MemoryRange a, MemoryRange b) { return a.begin < b.end && b.begin < a.end; }

// Whether tensors are adjacent in memory, like the blocks of one array.
inline bool are_pieces_of_one(const std::vector<at::Tensor>& tensors) {
  const char* next = bytes_at(tensors.front());
  for (const auto& tensor : tensors) {
    if (!is_plain(tensor) || bytes_at(tensor) != next ||
        !tensor.storage().is_alias_of(tensors.front().storage()))
      return false;
    next += tensor.nbytes();
  }
  return true;
}

}  // namespace pycomm::bindings
