// Compact packets on the device. codec/compact.h has the format, kernels/device_kernels.h the
// contract of the calls.
#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <span>
#include <vector>

#include "codec/format.h"
#include "cuda/compact_read.cuh"
#include "cuda/compact_values.cuh"
#include "cuda/compact_write.cuh"
#include "cuda/cuda_kernels.h"
#include "cuda/groups.hpp"
#include "cuda/host.hpp"
#include "cuda/layout.hpp"

namespace pycomm::cuda {
namespace {

static_assert(kGaps == codec::kRiceBlock && kLevelled == codec::kValueBlock);
static_assert(kMostWidth == codec::kMostParameter);
static_assert(kCompactHead == codec::kMostHead);
static_assert(kThreeBit == static_cast<unsigned>(codec::ValueCode::three_bit));
static_assert(kValueCodeCount == codec::kValueCodes.size() && kGridReach == codec::kReach);

unsigned blocks_of(size_t k) { return static_cast<unsigned>((k + kGaps - 1) / kGaps); }
unsigned runs_of(size_t k) { return std::max(1u, (blocks_of(k) + kRunBlocks - 1) / kRunBlocks); }

unsigned start_of(size_t k, size_t count) {
  return k == 0 ? 0 : static_cast<unsigned>(codec::rice_start(k, count));
}

template <class Arguments>
void set_head(Arguments& to, const codec::CompactHead& head) {
  to.head_bytes = static_cast<unsigned>(head.size);
  std::memcpy(to.head, head.bytes.data(), head.size);
}

// The launches for the packets of `rows`, at most Packets::kMost.
template <class Packets>
void write_some(std::span<const Writing> rows, cudaStream_t stream) {
  const auto packets = packets_of<Packets>(rows);
  unsigned runs = 0, words = 0;  // the most of any packet
  size_t items = 0;
  for (const Writing& w : rows) {
    runs = std::max(runs, w.run_count);
    words = std::max(words, w.word_count);
    // One warp per block of gaps, or one thread per 32 bits of a bitmap.
    items = std::max({items, size_t{32} * w.block_count, size_t{w.count} / 32});
  }
  const auto shape = [&](unsigned x, unsigned threads) {
    return gpu::Launch{x, threads, stream, 0, static_cast<unsigned>(rows.size())};
  };
  launch<measure<Packets>>("measure", shape(runs, kCompactThreads), packets);
  launch<choose_code<Packets>>("choose_code", shape(1, kTableThreads), packets);
  launch<encode_indices<Packets>>(
      "encode_indices", shape(blocks_for(items, kCompactThreads), kCompactThreads), packets);
  launch<copy_quotients<Packets>>(
      "copy_quotients", shape(blocks_for(size_t{4} * words, kCompactThreads), kCompactThreads),
      packets);
}

template <class Packets>
void read_some(std::span<const Reading> rows, cudaStream_t stream) {
  const auto packets = packets_of<Packets>(rows);
  unsigned chunks = 0, runs = 0, blocks = 0, values = 0;  // the most of any packet
  for (const Reading& r : rows) {
    values = std::max(values, values_of(r));
    chunks = std::max(chunks, r.chunk_count);
    runs = std::max(runs, r.run_count);
    blocks = std::max(blocks, r.block_count);
  }
  const auto count = static_cast<unsigned>(rows.size());
  const auto shape = [&](unsigned x, unsigned threads) {
    return gpu::Launch{x, threads, stream, 0, count};
  };
  launch<count_ones<Packets>>("count_ones", shape(chunks, kCompactThreads), packets);
  launch<sum_ones<Packets>>("sum_ones", shape(1, kTableThreads), packets);
  launch<place_ones<Packets>>("place_ones", shape(chunks, kCompactThreads), packets);
  if (blocks > 0) {
    launch<read_parameters<Packets>>("read_parameters", shape(1, kTableThreads), packets);
    launch<sum_gaps<Packets>>("sum_gaps", shape(runs, kCompactThreads), packets);
  }
  launch<sum_runs<Packets>>("sum_runs", shape(1, kTableThreads), packets);
  launch<read_indices<Packets>>(
      "read_indices", shape(blocks_for(size_t{32} * blocks, kCompactThreads), kCompactThreads),
      packets);
  if (rows.front().elements != nullptr)
    launch<expand_groups<Packets>>(
        "expand_groups", shape(blocks_for(values, kCompactThreads), kCompactThreads), packets);
}

// Places the tables of a packet in the workspace, and returns their size. `tensors`: its values are
// there, and its errors return to them.
size_t lay_out(Writing& w, size_t k, size_t group, bool tensors, void* workspace) {
  w.k = static_cast<unsigned>(k);
  w.value_count = static_cast<unsigned>(k * group);
  w.block_count = blocks_of(k);
  w.run_count = runs_of(k);
  w.word_count =
      static_cast<unsigned>((3 * k + (2 * kMostWidth + 1) * size_t{w.block_count}) / 32 + 1);
  BumpAllocator allocator(workspace);
  allocator.take(w.choice, 1);
  allocator.take(w.runs, w.run_count);
  allocator.take(w.blocks, w.block_count);
  allocator.take(w.ones, w.word_count);
  if (!tensors) return allocator.bytes();
  float* errors = nullptr;
  allocator.take(errors, w.value_count);
  w.errors = errors;
  return allocator.bytes();
}

size_t lay_out(Reading& r, size_t k, size_t group, size_t size, void* workspace) {
  r.k = static_cast<unsigned>(k);
  r.bits = static_cast<unsigned>(std::countr_zero(group));
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
  if (group > 1) allocator.take(r.indices, k);
  return allocator.bytes();
}

// Describes a packet that was placed.
void describe(Writing& w, const kernels::DeviceKernels::CompactInput& input, size_t count) {
  w.count = static_cast<unsigned>(count);
  w.code = input.codes.automatic ? 3 : static_cast<unsigned>(input.codes.index_code);
  w.value_code = static_cast<unsigned>(input.codes.value_code);
  w.start = start_of(w.k, count);
  set_head(w, codec::compact_head(w.k, count, input.group, codec::IndexCode::list,
                                  input.codes.value_code));
}

void describe(Reading& r, const kernels::DeviceKernels::CompactPacket& packet, size_t group) {
  r.bytes = reinterpret_cast<const uint8_t*>(packet.bytes);
  r.size = packet.size;
  r.count = static_cast<unsigned>(packet.count);
  r.first = static_cast<unsigned>(packet.first);
  for (size_t code = 0; code < std::size(r.limits.value_bytes); ++code)
    r.limits.value_bytes[code] =
        codec::value_bytes(static_cast<codec::ValueCode>(code), values_of(r));
  for (size_t code = 0; code < std::size(r.limits.least); ++code) {
    const auto index_code = static_cast<codec::IndexCode>(code);
    r.limits.least[code] = codec::least_index_bytes(index_code, r.k, packet.count);
    r.limits.most[code] = codec::most_index_bytes(index_code, r.k, packet.count);
  }
  r.start = start_of(r.k, packet.count);
  set_head(r, codec::compact_head(r.k, packet.count, group, codec::IndexCode::list,
                                  codec::ValueCode::float32));
}

template <class V>
void write_all_values(std::span<const Writing> rows, cudaStream_t stream) {
  for_each_launch<FewWritings, ManyWritings>(rows, [&](auto type, std::span<const Writing> some) {
    using Packets = typename decltype(type)::type;
    size_t most = 0;
    for (const Writing& w : some) most = std::max<size_t>(most, w.value_count);
    launch<write_values<V, Packets>>(
        "write_values",
        {blocks_for(most, kLevelled), kValueThreads, stream, 0, static_cast<unsigned>(some.size())},
        packets_of<Packets>(some));
  });
}

}  // namespace

void CudaKernels::encode_compact(std::span<const CompactSource> sources, const CompactInput& input,
                                 const CompactSizes& to, kernels::Queue queue) {
  const OnDevice on(queue);
  const bool tensors = !input.tensors.empty();
  GroupPlan plan = plan_of(input.tensors, input.group);
  BumpAllocator allocator(to.workspace.data);
  allocator.take(plan.tables.pieces, plan.pieces.size());
  size_t used = allocator.bytes();  // of the workspace
  std::vector<Writing> rows;
  for (const CompactSource& from : sources) {
    Writing& w = rows.emplace_back();
    w.indices = from.indices;
    w.values = from.values;
    w.errors = from.errors;
    used +=
        lay_out(w, from.k, input.group, tensors, static_cast<std::byte*>(to.workspace.data) + used);
    w.out = reinterpret_cast<uint8_t*>(from.out);
    w.bytes = to.sizes + (rows.size() - 1);
    w.first = static_cast<unsigned>(from.first);
    describe(w, input, from.count);
  }
  check(used <= to.workspace.bytes, "encode_compact: the workspace is too small");
  cudaStream_t const stream = stream_of(queue);
  if (tensors) {
    store_table(plan, stream);
    take_values(plan.tables, rows, stream);
  }
  for_each_launch<FewWritings, ManyWritings>(
      std::span<const Writing>(rows), [&](auto type, std::span<const Writing> some) {
        write_some<typename decltype(type)::type>(some, stream);
      });
  with_wide(input.codes.dtype,
            [&](auto type) { write_all_values<typename decltype(type)::type>(rows, stream); });
  if (tensors) leave_errors(plan.tables, rows, stream);
}

void CudaKernels::decode_compact(std::span<const CompactPacket> packets, const CompactArrays& to,
                                 kernels::Queue queue) {
  const OnDevice on(queue);
  std::vector<Reading> rows;
  size_t first = 0, used = 0;  // of the elements and the workspace
  for (const CompactPacket& packet : packets) {
    Reading& r = rows.emplace_back();
    used += lay_out(r, packet.k, to.group, packet.size,
                    static_cast<std::byte*>(to.workspace.data) + used);
    describe(r, packet, to.group);
    (to.group > 1 ? r.elements : r.indices) = to.indices + first;
    r.values = to.values + first;
    r.refused = to.refused + (rows.size() - 1);
    first += values_of(r);
  }
  check(used <= to.workspace.bytes, "decode_compact: the workspace is too small");
  cudaStream_t const stream = stream_of(queue);
  for_each_launch<FewReadings, ManyReadings>(
      std::span<const Reading>(rows), [&](auto type, std::span<const Reading> some) {
        read_some<typename decltype(type)::type>(some, stream);
      });
}

size_t CudaKernels::compact_encoding_bytes(std::span<const CompactSource> sources,
                                           const CompactInput& input) {
  BumpAllocator allocator(nullptr);
  GroupPiece* pieces = nullptr;
  allocator.take(pieces, input.tensors.size());
  size_t bytes = allocator.bytes();
  Writing w{};
  for (const CompactSource& from : sources)
    bytes += lay_out(w, from.k, input.group, !input.tensors.empty(), nullptr);
  return bytes;
}

size_t CudaKernels::compact_decoding_bytes(std::span<const CompactPacket> packets, size_t group) {
  size_t bytes = 0;
  Reading r{};
  for (const CompactPacket& packet : packets)
    bytes += lay_out(r, packet.k, group, packet.size, nullptr);
  return bytes;
}

}  // namespace pycomm::cuda
