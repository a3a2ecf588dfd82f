// CUDA's kernels behind the interface of kernels/device_kernels.h. No CUDA header is needed to
// include this one. Called by bindings/cuda.cpp; step.cu, topk.cu, packets.cu, lean.cu and
// dense.cu implement it.
#pragma once

#include <string>

#include "kernels/device_kernels.h"

namespace pycomm::cuda {

// Every call enqueues on the caller's stream and returns: nothing is allocated, nothing waits, and
// a stream that is being captured into a graph may be given. Throws Unsupported where there is no
// driver or no GPU, and InternalError with CUDA's words where a launch fails.
class CudaKernels final : public DeviceKernels {
 public:
  void dgc_step(const DgcStep& step, Queue queue) override;
  size_t dgc_workspace_bytes(const DgcTables& tables) override;
  void dgc_rollback(const DgcTables& tables, const float* found_inf, Queue queue) override;
  void momentum_mask(void* u, void* v, const Positions& where, Queue queue) override;
  void topk(TypedArray x, const TopK& what, Queue queue) override;
  size_t topk_workspace_bytes(size_t count, size_t k, Dtype dtype) override;
  void scatter_add(TypedArray out, const Packet& packet, Dtype value_dtype, double scale,
                   Queue queue) override;
  void decode_sum(const Chain& out, std::span<const Packet> packets, Dtype value_dtype,
                  double scale, Queue queue) override;
  void decode_update(const Chain& param, std::span<const Packet> packets, Dtype value_dtype,
                     Update update, Queue queue) override;
  void encode(const Packet& packet, const Encoding& encoding, Queue queue) override;
  void encode_lean(const Packet& packet, const LeanEncoding& encoding, const LeanRoom& room,
                   Queue queue) override;
  void decode_lean(const LeanPacket& packet, const LeanArrays& to, Queue queue) override;
  size_t lean_workspace_bytes(size_t k, size_t bytes) override;
  void norm(std::span<const Array> arrays, Dtype dtype, double* norms, Workspace workspace,
            Queue queue) override;
  size_t norm_workspace_bytes(std::span<const Array> arrays) override;
  void clip_scale(const double* norms, TypedArray factors, Clip clip, Queue queue) override;
  void multiply(TypedArray x, const void* factor, Queue queue) override;
  void cast(TypedArray x, TypedArray out, Queue queue) override;
  void reduce(TypedArray out, std::span<const void* const> xs, ReduceOp op, Queue queue) override;
};

// Why no GPU can be used here, in CUDA's words; empty where one can.
std::string why_not();

}  // namespace pycomm::cuda
