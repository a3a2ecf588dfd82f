// Compact packets on the device. codec/compact.h has the format, kernels/device_kernels.h the
// contract of the calls.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "codec/format.h"
#include "cuda/compact_read.cuh"
#include "cuda/compact_values.cuh"
#include "cuda/compact_write.cuh"
#include "cuda/cuda_kernels.h"
#include "cuda/host.hpp"
#include "cuda/layout.hpp"

namespace pycomm::cuda {
namespace {

static_assert(kGaps == codec::kRiceBlock && kLevelled == codec::kValueBlock);
static_assert(kMostWidth == codec::kMostParameter && kCompactHead == codec::kMostHead);
static_assert(kThreeBit == static_cast<unsigned>(codec::ValueCode::three_bit));
static_assert(kValueCodeCount == codec::kValueCodes.size() && kGridReach == codec::kReach);

unsigned blocks_of(size_t k) { return static_cast<unsigned>((k + kGaps - 1) / kGaps); }
unsigned runs_of(size_t k) { return std::max(1u, (blocks_of(k) + kRunBlocks - 1) / kRunBlocks); }

// The workspace of a call, and its size.
size_t lay_out(Writing& w, size_t k, void* workspace) {
  w.k = static_cast<unsigned>(k);
  w.block_count = blocks_of(k);
  w.run_count = runs_of(k);
  w.word_count =
      static_cast<unsigned>((3 * k + (2 * kMostWidth + 1) * size_t{w.block_count}) / 32 + 1);
  BumpAllocator allocator(workspace);
  allocator.take(w.choice, 1);
  allocator.take(w.runs, w.run_count);
  allocator.take(w.blocks, w.block_count);
  allocator.take(w.ones, w.word_count);
  return allocator.bytes();
}

size_t lay_out(Reading& r, size_t k, size_t size, void* workspace) {
  r.k = static_cast<unsigned>(k);
  r.block_count = blocks_of(k);
  r.run_count = runs_of(k);
  // Quotients and bitmaps have less than 2^32 bits; a longer packet is invalid.
  const size_t coded = std::min<size_t>(size, size_t{1} << 29);
  r.chunk_count = static_cast<unsigned>(std::max<size_t>(1, (coded + kChunk - 1) / kChunk));
  BumpAllocator allocator(workspace);
  allocator.take(r.verdict, 1);
  allocator.take(r.chunks, r.chunk_count);
  allocator.take(r.runs, r.run_count);
  allocator.take(r.blocks, r.block_count);
  allocator.take(r.ones, size_t{r.block_count} + k);
  return allocator.bytes();
}

unsigned start_of(size_t k, size_t count) {
  return k == 0 ? 0 : static_cast<unsigned>(codec::rice_start(k, count));
}

template <class Arguments>
void set_head(Arguments& to, const codec::CompactHead& head) {
  to.head_bytes = static_cast<unsigned>(head.size);
  std::memcpy(to.head, head.bytes.data(), head.size);
}

}  // namespace

void CudaKernels::encode_compact(const codec::Packet& packet,
                                 const codec::CompactEncoding& encoding,
                                 const CompactOutput& output, kernels::Queue queue) {
  const OnDevice on(queue);
  const size_t k = packet.count;
  Writing w{};
  check(lay_out(w, k, output.workspace.data) <= output.workspace.bytes,
        "encode_compact: the workspace is too small");
  w.indices = packet.indices;
  w.values = packet.values;
  w.residual = encoding.residual;
  w.out = reinterpret_cast<uint8_t*>(output.out);
  w.bytes = output.bytes;
  w.value_bytes = codec::value_bytes(encoding.value_code, k);
  w.count = static_cast<unsigned>(encoding.count);
  w.code = encoding.automatic ? 3 : static_cast<unsigned>(encoding.index_code);
  w.value_code = static_cast<unsigned>(encoding.value_code);
  w.start = start_of(k, encoding.count);
  set_head(w, codec::compact_head(k, encoding.count, codec::IndexCode::list, encoding.value_code));
  cudaStream_t const stream = stream_of(queue);
  launch("measure", measure, {w.run_count, kCompactThreads, stream}, w);
  launch("choose_code", choose_code, {1, kTableThreads, stream}, w);
  // One warp per block of gaps, or one thread per 32 bits of a bitmap.
  const size_t items = std::max<size_t>(size_t{32} * w.block_count, encoding.count / 32);
  const gpu::Launch shape{blocks_for(items, kCompactThreads), kCompactThreads, stream};
  launch("write_indices", write_indices, shape, w);
  launch("copy_quotients", copy_quotients,
         {blocks_for(size_t{4} * w.word_count, kCompactThreads), kCompactThreads, stream}, w);
  with_wide(encoding.dtype, [&](auto type) {
    launch("write_values", write_values<typename decltype(type)::type>,
           {blocks_for(k, kLevelled), kValueThreads, stream}, w);
  });
}

void CudaKernels::decode_compact(const CompactPacket& packet, const CompactArrays& to,
                                 kernels::Queue queue) {
  const OnDevice on(queue);
  const size_t k = packet.k;
  Reading r{};
  check(lay_out(r, k, packet.bytes.size(), to.workspace.data) <= to.workspace.bytes,
        "decode_compact: the workspace is too small");
  r.bytes = reinterpret_cast<const uint8_t*>(packet.bytes.data());
  r.size = packet.bytes.size();
  r.indices = to.indices;
  r.values = to.values;
  r.refused = to.refused;
  for (size_t code = 0; code < std::size(r.value_bytes); ++code)
    r.value_bytes[code] = codec::value_bytes(static_cast<codec::ValueCode>(code), k);
  for (size_t code = 0; code < std::size(r.least); ++code) {
    r.least[code] = codec::least_index_bytes(static_cast<codec::IndexCode>(code), k, packet.count);
    r.most[code] = codec::most_index_bytes(static_cast<codec::IndexCode>(code), k, packet.count);
  }
  r.count = static_cast<unsigned>(packet.count);
  r.start = start_of(k, packet.count);
  set_head(r,
           codec::compact_head(k, packet.count, codec::IndexCode::list, codec::ValueCode::float32));
  cudaStream_t const stream = stream_of(queue);
  const gpu::Launch chunks{r.chunk_count, kCompactThreads, stream};
  const gpu::Launch one{1, kTableThreads, stream};
  launch("count_ones", count_ones, chunks, r);
  launch("sum_ones", sum_ones, one, r);
  launch("place_ones", place_ones, chunks, r);
  if (k > 0) {
    launch("read_parameters", read_parameters, one, r);
    launch("sum_gaps", sum_gaps, {r.run_count, kCompactThreads, stream}, r);
  }
  launch("sum_runs", sum_runs, one, r);
  launch("read_indices", read_indices,
         {blocks_for(size_t{32} * r.block_count, kCompactThreads), kCompactThreads, stream}, r);
}

size_t CudaKernels::compact_workspace_bytes(size_t k, size_t bytes) {
  Writing w{};
  Reading r{};
  return std::max(lay_out(w, k, nullptr), lay_out(r, k, bytes, nullptr));
}

}  // namespace pycomm::cuda
