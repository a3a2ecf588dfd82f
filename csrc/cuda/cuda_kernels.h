// The CUDA implementation of kernels/device_kernels.h, in step.cu, topk.cu, packets.cu, compact.cu,
// quantize.cu, groups.cu and dense.cu. This header needs no CUDA header.
#pragma once

#include <string>

#include "kernels/device_kernels.h"

namespace pycomm::cuda {

class CudaGroupKernels : public kernels::DeviceKernels {
 public:
  void update_step(std::span<const kernels::UpdatePiece> pieces, Dtype dtype,
                   const kernels::LargestGroups& largest, kernels::Queue queue) override;
  void topk_groups(std::span<const kernels::Array> tensors, const kernels::LargestGroups& largest,
                   kernels::Queue queue) override;
  void write_groups(const kernels::GroupValues& values, kernels::Queue queue) override;
  size_t group_workspace_bytes(const kernels::GroupCounts& most) override;
};

// Every call enqueues on the caller's stream and returns. It allocates nothing and waits for
// nothing, and works during a stream capture. Throws Unsupported without a driver or GPU, and
// InternalError with the CUDA error text if a launch fails.
class CudaKernels final : public CudaGroupKernels {
 public:
  void dgc_step(const kernels::DgcStep& step, kernels::Queue queue) override;
  size_t dgc_workspace_bytes(const kernels::DgcTables& tables) override;
  void dgc_rollback(const kernels::DgcTables& tables, const float* found_inf,
                    kernels::Queue queue) override;
  void momentum_mask(void* u, void* v, const Positions& where, kernels::Queue queue) override;
  void topk(kernels::TypedArray x, const TopK& what, kernels::Queue queue) override;
  size_t topk_workspace_bytes(size_t count, size_t k, Dtype dtype) override;
  void scatter_add(kernels::TypedArray out, const codec::Packet& packet, Dtype value_dtype,
                   double scale, kernels::Queue queue) override;
  void decode_sum(const kernels::Chain& out, std::span<const codec::Packet> packets,
                  Dtype value_dtype, double scale, kernels::Queue queue) override;
  void decode_update(const kernels::Chain& param, std::span<const codec::Packet> packets,
                     Dtype value_dtype, Update update, kernels::Queue queue) override;
  void encode(const codec::Packet& packet, const Encoding& encoding, kernels::Queue queue) override;
  void encode_compact(std::span<const CompactSource> sources, const CompactInput& input,
                      const CompactSizes& to, kernels::Queue queue) override;
  void decode_compact(std::span<const CompactPacket> packets, const CompactArrays& to,
                      kernels::Queue queue) override;
  size_t compact_encoding_bytes(std::span<const CompactSource> sources,
                                const CompactInput& input) override;
  size_t compact_decoding_bytes(std::span<const CompactPacket> packets, size_t group) override;
  void quantize(kernels::TypedArray x, const kernels::Blocks& blocks, kernels::Feedback feedback,
                std::byte* out, kernels::Queue queue) override;
  void dequantize(const std::byte* packet, const kernels::Blocks& blocks,
                  const kernels::Decoding& decoding, kernels::TypedArray out,
                  kernels::Queue queue) override;
  void norm(std::span<const kernels::Array> arrays, Dtype dtype, double* norms,
            kernels::Workspace workspace, kernels::Queue queue) override;
  size_t norm_workspace_bytes(std::span<const kernels::Array> arrays) override;
  void clip_scale(const double* norms, kernels::TypedArray factors, Clip clip,
                  kernels::Queue queue) override;
  void multiply(kernels::TypedArray x, const void* factor, kernels::Queue queue) override;
  void cast(kernels::TypedArray x, kernels::TypedArray out, kernels::Queue queue) override;
  void reduce(kernels::TypedArray out, std::span<const void* const> xs, ReduceOp op,
              kernels::Queue queue) override;
};

// The CUDA error why no GPU is usable; empty if one is.
std::string why_not();

}  // namespace pycomm::cuda
