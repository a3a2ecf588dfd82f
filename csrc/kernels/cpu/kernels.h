// The CPU implementation of DeviceKernels, in step.cpp, topk.cpp, packets.cpp, compact.cpp,
// quantize.cpp, groups.cpp and dense.cpp. cpu_kernels() in dense.cpp returns the only object, which
// is stateless.
#pragma once

#include <span>

#include "kernels/device_kernels.h"

namespace pycomm::kernels {

class CpuGroupKernels : public DeviceKernels {
 public:
  void update_step(std::span<const UpdatePiece> pieces, Dtype dtype, const LargestGroups& largest,
                   Queue queue) override;
  void topk_groups(std::span<const Array> tensors, const LargestGroups& largest,
                   Queue queue) override;
  void write_groups(const GroupValues& values, Queue queue) override;
  size_t group_workspace_bytes(const GroupCounts& most) override;
};

class CpuKernels final : public CpuGroupKernels {
 public:
  void dgc_step(const DgcStep& step, Queue queue) override;
  size_t dgc_workspace_bytes(const DgcTables& tables) override;
  void dgc_rollback(const DgcTables& tables, const float* found_inf, Queue queue) override;
  void momentum_mask(void* u, void* v, const Positions& where, Queue queue) override;
  void topk(TypedArray x, const TopK& what, Queue queue) override;
  size_t topk_workspace_bytes(size_t count, size_t k, Dtype dtype) override;
  void scatter_add(TypedArray out, const codec::Packet& packet, Dtype value_dtype, double scale,
                   Queue queue) override;
  void decode_sum(const Chain& out, std::span<const codec::Packet> packets, Dtype value_dtype,
                  double scale, Queue queue) override;
  void decode_update(const Chain& param, std::span<const codec::Packet> packets, Dtype value_dtype,
                     Update update, Queue queue) override;
  void encode(const codec::Packet& packet, const Encoding& encoding, Queue queue) override;
  void encode_compact(std::span<const CompactSource> sources, const CompactInput& input,
                      const CompactSizes& to, Queue queue) override;
  void decode_compact(std::span<const CompactPacket> packets, const CompactArrays& to,
                      Queue queue) override;
  size_t compact_encoding_bytes(std::span<const CompactSource> sources,
                                const CompactInput& input) override;
  size_t compact_decoding_bytes(std::span<const CompactPacket> packets, size_t group) override;
  void quantize(TypedArray x, const Blocks& blocks, Feedback feedback, std::byte* out,
                Queue queue) override;
  void dequantize(const std::byte* packet, const Blocks& blocks, const Decoding& decoding,
                  TypedArray out, Queue queue) override;
  void norm(std::span<const Array> arrays, Dtype dtype, double* norms, Workspace workspace,
            Queue queue) override;
  size_t norm_workspace_bytes(std::span<const Array> arrays) override;
  void clip_scale(const double* norms, TypedArray factors, Clip clip, Queue queue) override;
  void multiply(TypedArray x, const void* factor, Queue queue) override;
  void cast(TypedArray x, TypedArray out, Queue queue) override;
  void reduce(TypedArray out, std::span<const void* const> xs, ReduceOp op, Queue queue) override;
};

}  // namespace pycomm::kernels
