// Compact packets on the device. codec/compact.h has the format, kernels/device_kernels.h the
// contract of the calls.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

#include "codec/format.h"
#include "cuda/compact.hpp"
#include "cuda/compact_read.cuh"
#include "cuda/compact_values.cuh"
#include "cuda/compact_write.cuh"
#include "cuda/cuda_kernels.h"
#include "cuda/host.hpp"
#include "cuda/layout.hpp"

namespace pycomm::cuda {
namespace {

static_assert(kGaps == codec::kRiceBlock && kLevelled == codec::kValueBlock);
static_assert(kMostWidth == codec::kMostParameter);
static_assert(kCompactHead == codec::kMostHead && kGroupHead == codec::kMostGroupHead);
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

template <class Packets, class Row>
Packets packets_of(std::span<const Row> rows) {
  Packets packets{};
  std::ranges::copy(rows, packets.of);
  return packets;
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
  launch("measure", measure<Packets>, shape(runs, kCompactThreads), packets);
  launch("choose_code", choose_code<Packets>, shape(1, kTableThreads), packets);
  launch("encode_indices", encode_indices<Packets>,
         shape(blocks_for(items, kCompactThreads), kCompactThreads), packets);
  launch("copy_quotients", copy_quotients<Packets>,
         shape(blocks_for(size_t{4} * words, kCompactThreads), kCompactThreads), packets);
}

template <class Packets>
void read_some(std::span<const Reading> rows, cudaStream_t stream) {
  const auto packets = packets_of<Packets>(rows);
  unsigned chunks = 0, runs = 0, blocks = 0;  // the most of any packet
  for (const Reading& r : rows) {
    chunks = std::max(chunks, r.chunk_count);
    runs = std::max(runs, r.run_count);
    blocks = std::max(blocks, r.block_count);
  }
  const auto count = static_cast<unsigned>(rows.size());
  const auto shape = [&](unsigned x, unsigned threads) {
    return gpu::Launch{x, threads, stream, 0, count};
  };
  launch("count_ones", count_ones<Packets>, shape(chunks, kCompactThreads), packets);
  launch("sum_ones", sum_ones<Packets>, shape(1, kTableThreads), packets);
  launch("place_ones", place_ones<Packets>, shape(chunks, kCompactThreads), packets);
  if (blocks > 0) {
    launch("read_parameters", read_parameters<Packets>, shape(1, kTableThreads), packets);
    launch("sum_gaps", sum_gaps<Packets>, shape(runs, kCompactThreads), packets);
  }
  launch("sum_runs", sum_runs<Packets>, shape(1, kTableThreads), packets);
  launch("read_indices", read_indices<Packets>,
         shape(blocks_for(size_t{32} * blocks, kCompactThreads), kCompactThreads), packets);
}

}  // namespace

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

void describe(Writing& w, size_t count, codec::ValueCode value_code,
              const std::array<char, 3>& magic) {
  w.count = static_cast<unsigned>(count);
  w.value_code = static_cast<unsigned>(value_code);
  w.start = start_of(w.k, count);
  set_head(w, codec::compact_head({w.k, count}, codec::IndexCode::list, value_code, magic));
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

void describe(Reading& r, std::span<const std::byte> packet, size_t count,
              std::optional<size_t> values) {
  r.bytes = reinterpret_cast<const uint8_t*>(packet.data());
  r.size = packet.size();
  r.count = static_cast<unsigned>(count);
  r.value_count = static_cast<unsigned>(values.value_or(r.k));
  r.all = values && r.k == count;
  for (size_t code = 0; code < std::size(r.limits.value_bytes); ++code)
    r.limits.value_bytes[code] =
        codec::value_bytes(static_cast<codec::ValueCode>(code), r.value_count);
  for (size_t code = 0; code < std::size(r.limits.least) && !r.all; ++code) {
    r.limits.least[code] =
        codec::least_index_bytes(static_cast<codec::IndexCode>(code), r.k, count);
    r.limits.most[code] = codec::most_index_bytes(static_cast<codec::IndexCode>(code), r.k, count);
  }
  r.start = start_of(r.k, count);
  constexpr auto kList = codec::IndexCode::list;
  constexpr auto kFloat = codec::ValueCode::float32;
  set_head(r, values ? codec::compact_head({r.k, count, *values}, kList, kFloat, codec::kGroupMagic)
                     : codec::compact_head({r.k, count}, kList, kFloat));
}

void read_packets(std::span<const Reading> rows, cudaStream_t stream) {
  for_each_launch<FewReadings, ManyReadings>(rows, [&](auto type, std::span<const Reading> some) {
    read_some<typename decltype(type)::type>(some, stream);
  });
}

void write_indices(std::span<const Writing> rows, cudaStream_t stream) {
  for_each_launch<FewWritings, ManyWritings>(rows, [&](auto type, std::span<const Writing> some) {
    write_some<typename decltype(type)::type>(some, stream);
  });
}

void CudaKernels::encode_compact(std::span<const codec::CompactSource> sources,
                                 const codec::CompactCodes& codes, const CompactSizes& to,
                                 kernels::Queue queue) {
  const OnDevice on(queue);
  std::vector<Writing> rows;
  size_t used = 0;  // of the workspace
  for (const codec::CompactSource& from : sources) {
    Writing& w = rows.emplace_back();
    used += lay_out(w, from.k, static_cast<std::byte*>(to.workspace.data) + used);
    w.indices = from.indices;
    w.values = from.values;
    w.errors = from.errors;
    w.out = reinterpret_cast<uint8_t*>(from.out);
    w.bytes = to.sizes + (rows.size() - 1);
    w.first = static_cast<unsigned>(from.first);
    w.code = codes.automatic ? 3 : static_cast<unsigned>(codes.index_code);
    describe(w, from.count, codes.value_code, codec::kCompactMagic);
  }
  check(used <= to.workspace.bytes, "encode_compact: the workspace is too small");
  cudaStream_t const stream = stream_of(queue);
  write_indices(rows, stream);
  with_wide(codes.dtype, [&](auto type) {
    using V = typename decltype(type)::type;
    for_each_launch<FewWritings, ManyWritings>(
        std::span<const Writing>(rows), [&](auto few, std::span<const Writing> some) {
          using Packets = typename decltype(few)::type;
          size_t most = 0;
          for (const Writing& w : some) most = std::max<size_t>(most, w.k);
          launch("write_values", write_values<V, Packets>,
                 {blocks_for(most, kLevelled), kValueThreads, stream, 0,
                  static_cast<unsigned>(some.size())},
                 packets_of<Packets>(some));
        });
  });
}

void CudaKernels::decode_compact(std::span<const CompactPacket> packets, const CompactArrays& to,
                                 kernels::Queue queue) {
  const OnDevice on(queue);
  std::vector<Reading> rows;
  size_t first = 0, used = 0;  // of the elements and the workspace
  for (const CompactPacket& packet : packets) {
    Reading& r = rows.emplace_back();
    used += lay_out(r, packet.k, packet.size, static_cast<std::byte*>(to.workspace.data) + used);
    describe(r, {packet.bytes, packet.size}, packet.count, std::nullopt);
    r.first = static_cast<unsigned>(packet.first);
    r.indices = to.indices + first;
    r.values = to.values + first;
    r.refused = to.refused + (rows.size() - 1);
    first += packet.k;
  }
  check(used <= to.workspace.bytes, "decode_compact: the workspace is too small");
  read_packets(rows, stream_of(queue));
}

size_t CudaKernels::compact_encoding_bytes(std::span<const codec::CompactSource> sources) {
  size_t bytes = 0;
  Writing w{};
  for (const codec::CompactSource& from : sources) bytes += lay_out(w, from.k, nullptr);
  return bytes;
}

size_t CudaKernels::compact_decoding_bytes(std::span<const CompactPacket> packets) {
  size_t bytes = 0;
  Reading r{};
  for (const CompactPacket& packet : packets) bytes += lay_out(r, packet.k, packet.size, nullptr);
  return bytes;
}

}  // namespace pycomm::cuda
