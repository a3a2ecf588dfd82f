// The interface of the sparse-training kernels: formula, shapes and aliasing of each. kernels/cpu/
// implements it for the CPU, cuda/ for CUDA, with identical bits. pycomm/reference/ defines every
// kernel in NumPy.
//
// Rules for all kernels:
//   * The caller validates (pycomm/kernels does): sizes agree, an output overlaps no other array
//     except where documented, pointers are aligned to their elements, and an array, or the arrays
//     of one selection together, have fewer than 2^31 elements.
//   * Each element is computed on its own, in float32 for 16-bit and 32-bit floats and in float64
//     for float64, with exactly the operations documented here. fma rounds once, every operation
//     rounds to nearest even, subnormals are kept, and a computed NaN is the quiet NaN 0x7fc00000.
//   * The magnitude of x is its bits without the sign, as an integer. So NaN ranks above infinity,
//     infinity above all finite numbers, and the order is total.
//   * Indices are int32 and ascending. Of equal magnitudes the lower index wins. Indices passed to
//     a call may be invalid, because other ranks sent them. If they do not ascend within
//     0..count-1, the CPU throws InvalidArgument before it changes anything. A GPU cannot check in
//     time: it skips indices out of range and never accesses other memory.
//   * A workspace is device memory, aligned to 16 bytes, of the size that the matching
//     *_workspace_bytes() returns. A GPU call allocates nothing else and does not wait for the
//     device; it completes in stream order. A CPU call completes before it returns.
//   * Implementations are stateless: any number of threads may call, with different arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/compact.h"
#include "codec/packet.h"
#include "core/dtype.h"
#include "core/reduce_op.h"
#include "kernels/groups.h"
#include "kernels/quantize.h"
#include "kernels/tables.h"

namespace pycomm::kernels {

// One tensor of a DGC step. `grad` and `weight` are read, u and v are read and written.
struct DgcPiece {
  const void* grad;
  const void* weight;  // null without decay
  void* u;
  void* v;
  size_t count;
};

// A selection of k elements from the next `pieces` tensors of the table, concatenated: an index is
// `first` plus the position in the concatenation. The selections use each tensor once, in order.
struct DgcSelection {
  size_t pieces;
  size_t k;
  size_t first;
  int32_t* indices;  // [k]
  void* values;      // [k], dtype of u and v
  void* u_values;    // [k], same dtype; may be null
};

struct DgcTables {
  std::span<const DgcPiece> pieces;
  std::span<const DgcSelection> selections;
  Dtype dtype;  // of u, v and values: float32 or float64
};

struct DgcStep {
  DgcTables tables;
  Dtype grad_dtype;    // float16, bfloat16 or float32; float64 if u and v are
  Dtype weight_dtype;  // that of the gradients or of u and v
  double momentum;     // these three are rounded to the dtype of u and v
  double weight_decay;
  double scale;
  const void* scales;  // [pieces], dtype of u and v: replaces `scale`; may be null
  bool nesterov;
  bool masking;
  const float* found_inf;  // one number on the device; may be null
  Workspace workspace;
};

// Arrays of one dtype: an index counts through all of them. Each begins at a multiple of `group`,
// a power of two; what is between the end of one and the begin of the next is in no array.
struct Chain {
  std::span<const Array> arrays;
  Dtype dtype;
  size_t group = 1;
};

// An array of one dtype.
struct TypedArray {
  void* data;
  size_t count;
  Dtype dtype;
};

// The part of DeviceKernels for groups of neighbours, groups.h.
class GroupKernels {
 public:
  virtual ~GroupKernels() = default;

  // For each element: residual += theta - param, in float32; param = theta. `dtype`: of theta and
  // param: float16, bfloat16 or float32. Then the largest groups of the residual.
  virtual void update_step(std::span<const UpdatePiece> pieces, Dtype dtype,
                           const LargestGroups& largest, Queue queue) = 0;
  // The largest groups of float32 tensors.
  virtual void topk_groups(std::span<const Array> tensors, const LargestGroups& largest,
                           Queue queue) = 0;
  // The CPU throws InvalidArgument unless the indices ascend in their range. A GPU ignores those
  // out of range.
  virtual void write_groups(const GroupValues& values, Queue queue) = 0;
  virtual size_t group_workspace_bytes(const GroupCounts& most) = 0;
};

class DeviceKernels : public GroupKernels {
 public:
  // ---- the DGC step (arXiv 1712.01887, with momentum correction and factor masking) -------------

  // For each element of each tensor, with s = scales[tensor] or scale:
  //   x = fma(weight_decay, weight, s * grad)      s * grad without decay (weight_decay is 0)
  //   u = fma(momentum, u, x)                      Nesterov: t = u + x; u = momentum * t
  //   v = v + u                                    Nesterov: v = v + (u + x)
  // then for each selection the k largest magnitudes of v:
  //   indices, values = their positions, and v there
  //   u_values = u there
  //   v = 0 there, and u = 0 there if masking or if the value is not finite.
  // If found_inf is not 0, the step is skipped: u and v are unchanged, and the packet is the first
  // k indices with values and u_values 0.
  // The workspace belongs to these tables: zeroed before the first step, and not modified between
  // steps. Its contents speed up the next step and never change a result.
  virtual void dgc_step(const DgcStep& step, Queue queue) = 0;
  virtual size_t dgc_workspace_bytes(const DgcTables& tables) = 0;

  // Rolls back a step: v = values, u = u_values at the indices; no change if found_inf is not 0.
  // Reads u, v and count of the pieces.
  virtual void dgc_rollback(const DgcTables& tables, const float* found_inf, Queue queue) = 0;

  // u[indices] = 0, v[indices] = 0, for arrays of `count`; u or v may be null.
  struct Positions {
    std::span<const int32_t> indices;
    size_t count;
    Dtype dtype;  // of u and v
  };
  virtual void momentum_mask(void* u, void* v, const Positions& where, Queue queue) = 0;

  // ---- selection --------------------------------------------------------------------------------

  // The k largest magnitudes of x (any float dtype): positions and values. `indices` and `values`
  // may be null. `threshold`, if not null, is set to the k-th magnitude, sign cleared. k <=
  // x.count, and k >= 1 with a threshold.
  struct TopK {
    size_t k;
    int32_t* indices;  // [k]
    void* values;      // [k], dtype of x
    void* threshold;   // [1], dtype of x
    Workspace workspace;
  };
  virtual void topk(TypedArray x, const TopK& what, Queue queue) = 0;
  virtual size_t topk_workspace_bytes(size_t count, size_t k, Dtype dtype) = 0;

  // ---- packets ----------------------------------------------------------------------------------

  // Values may have any float dtype. They are rounded to the arithmetic dtype of `out`, and so are
  // scale, lr and every product and sum.

  // out[i] = out[i] + scale * value, for each (index, value) of the packet.
  virtual void scatter_add(TypedArray out, const codec::Packet& packet, Dtype value_dtype,
                           double scale, Queue queue) = 0;

  // out[i] = scale * sum over packets of value, 0 if no packet has i. The sum starts with the first
  // packet that has i and adds the others in list order.
  virtual void decode_sum(const Chain& out, std::span<const codec::Packet> packets,
                          Dtype value_dtype, double scale, Queue queue) = 0;

  // param[i] = fma(-lr, scale * sum, param[i]), only if a packet has i; sum as above.
  struct Update {
    double lr;
    double scale;
  };
  virtual void decode_update(const Chain& param, std::span<const codec::Packet> packets,
                             Dtype value_dtype, Update update, Queue queue) = 0;

  // Writes an encoded packet (packet.h) of `value_dtype` from values of `dtype` of an array of
  // `count` elements. Error feedback: residual[i] = residual[i] + (value - encoded value), if
  // residual ([count], dtype of the values) is not null.
  struct Encoding {
    size_t count;
    Dtype dtype;
    Dtype value_dtype;
    void* residual;
    std::byte* out;  // raw_packet_bytes(k, value_dtype)
  };
  virtual void encode(const codec::Packet& packet, const Encoding& encoding, Queue queue) = 0;

  // ---- compact packets, codec/compact.h ---------------------------------------------------------

  // The groups of a packet, and where it is written. A row of 64-bit words from Python.
  struct CompactSource {
    const int32_t* indices;  // [k]; the packet has them less `first`
    void* values;            // [k * group]
    size_t k;
    size_t first;
    size_t count;
    void* errors;    // [k * group], as the values: value - encoded value; may be null
    std::byte* out;  // most_compact_bytes()
  };
  // Where the values are. Without tensors in the values of each source, which are read. With
  // tensors, float32, there: the indices are those of their groups, and the values become what was
  // there, 0 after the end of a tensor. There the encoded values are subtracted; what is not finite
  // then becomes 0.
  struct CompactInput {
    codec::CompactCodes codes;
    size_t group;
    std::span<const Array> tensors;
  };
  // Writes a packet for each source, and its size to `sizes`. If the indices of one do not ascend
  // in their range, the CPU throws; a GPU writes size 0 and errors of -0, and changes no tensor.
  // The workspace keeps nothing between calls.
  struct CompactSizes {
    uint64_t* sizes;  // [sources], on the device
    Workspace workspace;
  };
  virtual void encode_compact(std::span<const CompactSource> sources, const CompactInput& input,
                              const CompactSizes& to, Queue queue) = 0;

  // A packet to decode, of groups of `count`. A row of 64-bit words from Python.
  struct CompactPacket {
    const std::byte* bytes;
    size_t size;
    size_t k;
    size_t first;
    size_t count;
  };
  // Elements of all packets, in order. The elements of group g are g * group + 0..group-1:
  // positions in a Chain of this group.
  struct CompactArrays {
    size_t group;
    int32_t* indices;
    float* values;
    uint32_t* refused;  // [packets], on the device
    Workspace workspace;
  };
  // Decodes packets from arbitrary bytes; `first` is added to the numbers of the groups. Where
  // refused[p] is 0, they ascend in first..first+count-1. For invalid bytes the CPU throws; a GPU
  // sets refused[p] to 1, the packet's indices to -1 and its values to 0.
  virtual void decode_compact(std::span<const CompactPacket> packets, const CompactArrays& to,
                              Queue queue) = 0;
  // Workspaces of these calls; they read the numbers only.
  virtual size_t compact_encoding_bytes(std::span<const CompactSource> sources,
                                        const CompactInput& input) = 0;
  virtual size_t compact_decoding_bytes(std::span<const CompactPacket> packets, size_t group) = 0;

  // ---- quantized arrays, quantize.h -------------------------------------------------------------

  // x: float16, bfloat16 or float32; x, residual and lost have one length. Writes
  // quantized_bytes().
  virtual void quantize(TypedArray x, const Blocks& blocks, Feedback feedback, std::byte* out,
                        Queue queue) = 0;
  // Writes `not_finite` only to set it to 1.
  virtual void dequantize(const std::byte* packet, const Blocks& blocks, const Decoding& decoding,
                          TypedArray out, Queue queue) = 0;

  // ---- dense ------------------------------------------------------------------------------------

  // norms[j] = sqrt(sum of squares of arrays[j]), in float64, in a fixed order of additions:
  // S(a) of an array a of squares is, in tiles of 4096 elements,
  //   lane[j] = a[j] + a[128 + j] + a[256 + j] + ...   left to right, j < 128; fma(x, x, lane)
  //   tile = the lanes added in pairs: lane[j] += lane[j + w] for w = 64, 32, ..., 1
  // then S of the tiles' sums (without squaring), until one number remains. A lane without elements
  // is 0, and an array without elements has the norm 0.
  virtual void norm(std::span<const Array> arrays, Dtype dtype, double* norms, Workspace workspace,
                    Queue queue) = 0;
  virtual size_t norm_workspace_bytes(std::span<const Array> arrays) = 0;

  // factors[j] = scale * min(1, limit / norms[j]), computed in float64 and rounded to the dtype of
  // `factors`. A norm of 0 or a non-finite norm does not clip.
  struct Clip {
    double limit;
    double scale;
  };
  virtual void clip_scale(const double* norms, TypedArray factors, Clip clip, Queue queue) = 0;

  // x[i] = x[i] * factor. The factor is a number on the device, of the arithmetic dtype of x.
  // Factor 1 changes nothing.
  virtual void multiply(TypedArray x, const void* factor, Queue queue) = 0;

  // out[i] = x[i] rounded to the dtype of `out`; floats only; the arrays have the same count.
  virtual void cast(TypedArray x, TypedArray out, Queue queue) = 0;

  // out[i] = xs[0][i] (+) xs[1][i] (+) ..., left to right; 16-bit floats are rounded once. `out`
  // may be one of xs. kernels.h defines each dtype and operation.
  virtual void reduce(TypedArray out, std::span<const void* const> xs, ReduceOp op,
                      Queue queue) = 0;
};

// The CPU implementation. Large arrays are split over the number of threads set by
// set_kernel_threads(), by default one per available processor. Results do not depend on it.
DeviceKernels& cpu_kernels();
void set_kernel_threads(int threads);
int kernel_threads();

}  // namespace pycomm::kernels
