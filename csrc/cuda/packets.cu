// Kernels on packets: rollback, masking, scatter, decode, encode. kernels/device_kernels.h has the
// formulas.
#include "codec/packet.h"
#include "cuda/cuda_kernels.h"
#include "cuda/decode.cuh"
#include "cuda/host.hpp"

namespace pycomm::cuda {
namespace {

constexpr unsigned kThreads = 256;

// ---- rollback -----------------------------------------------------------------------------------

struct SentPiece {
  void* u;
  void* v;
  unsigned place, count;
};
struct SentSelection {
  const int32_t* indices;
  const void* values;
  const void* u_values;
  unsigned k, first;
  unsigned first_piece, pieces;  // of the page
};
// A selection with more pieces than a page uses several pages.
struct SentPage {
  unsigned pieces, selections;
  SentPiece piece[320];
  SentSelection selection[320];
};
static_assert(sizeof(SentPage) <= 32000);

constexpr unsigned kBlocksEach = 8;  // of a selection

template <class V>
__global__ void __launch_bounds__(kThreads)
    roll_back(const __grid_constant__ SentPage page, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.f) return;
  const SentSelection& s = page.selection[blockIdx.x / kBlocksEach];
  const unsigned part = blockIdx.x % kBlocksEach;
  for (unsigned i = part * kThreads + threadIdx.x; i < s.k; i += kBlocksEach * kThreads) {
    const int64_t place = int64_t{s.indices[i]} - s.first;
    unsigned low = 0, high = s.pieces;  // the last piece that begins at or before this position
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      if (page.piece[s.first_piece + middle].place <= place)
        low = middle;
      else
        high = middle;
    }
    const SentPiece& piece = page.piece[s.first_piece + low];
    const int64_t at = place - piece.place;
    if (at < 0 || at >= piece.count) continue;
    static_cast<V*>(piece.v)[at] = static_cast<const V*>(s.values)[i];
    static_cast<V*>(piece.u)[at] = static_cast<const V*>(s.u_values)[i];
  }
}

// Calls f(page) for pages that together have all pieces of all selections.
template <class F>
void each_page(const kernels::DgcTables& tables, F f) {
  SentPage page{};
  const auto flush = [&] {
    if (page.selections != 0) f(page);
    page.pieces = page.selections = 0;
  };
  const kernels::DgcPiece* next = tables.pieces.data();
  for (const kernels::DgcSelection& from : tables.selections) {
    unsigned place = 0;
    for (size_t done = 0; done < from.pieces;) {
      if (page.pieces == std::size(page.piece) || page.selections == std::size(page.selection))
        flush();
      const size_t fits = std::min(from.pieces - done, std::size(page.piece) - page.pieces);
      page.selection[page.selections++] = {from.indices,     from.values,          from.u_values,
                                           unsigned(from.k), unsigned(from.first), page.pieces,
                                           unsigned(fits)};
      for (size_t i = 0; i < fits; ++i, ++done, ++next) {
        page.piece[page.pieces++] = {next->u, next->v, place, unsigned(next->count)};
        place += unsigned(next->count);
      }
    }
  }
  flush();
}

// ---- single elements ----------------------------------------------------------------------------

template <class V>
__global__ void __launch_bounds__(kThreads)
    mask(V* u, V* v, const int32_t* indices, unsigned k, unsigned count) {
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < k; i += gridDim.x * kThreads) {
    const int32_t at = indices[i];
    if (at < 0 || static_cast<unsigned>(at) >= count) continue;
    if (u != nullptr) u[at] = V{0};
    if (v != nullptr) v[at] = V{0};
  }
}

template <class T, class V>
__global__ void __launch_bounds__(kThreads)
    scatter(T* out, unsigned count, Entries packet, Wide<T> scale) {
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < packet.count;
       i += gridDim.x * kThreads) {
    const int32_t at = packet.indices[i];
    if (at < 0 || static_cast<unsigned>(at) >= count) continue;
    const auto value = static_cast<Wide<T>>(widen(static_cast<const V*>(packet.values)[i]));
    out[at] = narrow<T>(add(widen(out[at]), multiply(scale, value)));
  }
}

struct EncodedPacket {
  std::byte* bytes;
  void* values;
  int32_t* indices;
  size_t padding_begin, padding_end;  // bytes between values and indices
  codec::PacketHeader header;
};

// V: type of the values; T: type in the packet.
template <class T, class V>
__global__ void __launch_bounds__(kThreads)
    write_packet(const __grid_constant__ EncodedPacket to, Entries from, V* residual,
                 unsigned count) {
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread < sizeof(codec::PacketHeader))
    to.bytes[thread] = reinterpret_cast<const std::byte*>(&to.header)[thread];
  if (to.padding_begin + thread < to.padding_end)
    to.bytes[to.padding_begin + thread] = std::byte{0};
  for (unsigned i = thread; i < from.count; i += gridDim.x * kThreads) {
    const int32_t at = from.indices[i];
    const V value = static_cast<const V*>(from.values)[i];
    const T sent = narrow<T>(value);
    to.indices[i] = at;
    static_cast<T*>(to.values)[i] = sent;
    if (residual == nullptr || at < 0 || static_cast<unsigned>(at) >= count) continue;
    residual[at] = canonical(add(residual[at], add(value, -static_cast<V>(widen(sent)))));
  }
}

Entries entries(const codec::Packet& packet) {
  return {packet.indices, packet.values, static_cast<unsigned>(packet.count)};
}

// ---- decode -------------------------------------------------------------------------------------

// The shape of a decode launch: as few blocks as their shared memory allows for the average number
// of entries, and enough of them to occupy the device.
template <class Real>
gpu::Launch shape_decoding(Decoding& d, double entries_each, cudaStream_t stream) {
  const size_t positions = d.end - d.begin;
  const size_t entries = static_cast<size_t>(entries_each * static_cast<double>(positions));
  const size_t least = size_t{kDecodeResident} * multiprocessors();
  const size_t blocks = std::max(least, entries / (kCapacity<Real> / 4 * 3));
  constexpr size_t kStep = 64;  // so that blocks share no sector of aligned arrays
  d.range = static_cast<unsigned>((positions + blocks * kStep - 1) / (blocks * kStep) * kStep);
  return {static_cast<unsigned>((positions + d.range - 1) / d.range), kDecodeThreads, stream};
}

// Calls f(decoding, shape) for launches that together cover all arrays.
template <class Real, class F>
void each_decoding(const kernels::Chain& chain, std::span<const codec::Packet> packets,
                   cudaStream_t stream, F f) {
  if (packets.size() > kMostPackets)
    throw Unsupported("cannot decode " + std::to_string(packets.size()) +
                      " packets at once: at most " + std::to_string(kMostPackets));
  Decoding d{};
  d.packet_count = static_cast<unsigned>(packets.size());
  std::transform(packets.begin(), packets.end(), d.packets, entries);
  double sent = 0, count = 0;
  for (const codec::Packet& packet : packets) sent += static_cast<double>(packet.count);
  const auto positions_of = [&](const kernels::Array& array) {
    return static_cast<unsigned>(kernels::groups_in(array.count, chain.group) * chain.group);
  };
  for (const kernels::Array& array : chain.arrays) count += positions_of(array);
  d.each = static_cast<float>(1 / std::max(count, 1.));
  for (size_t done = 0; done < chain.arrays.size();) {
    d.begin = d.end;
    for (d.array_count = 0; done < chain.arrays.size() && d.array_count < kMostArrays; ++done) {
      const kernels::Array& array = chain.arrays[done];
      if (array.count == 0) continue;
      d.arrays[d.array_count++] = {array.data, d.end, static_cast<unsigned>(array.count)};
      d.end += positions_of(array);
    }
    if (d.begin == d.end) continue;
    const gpu::Launch shape = shape_decoding<Real>(d, sent / count, stream);
    f(d, shape);
  }
}

template <bool kUpdate>
void decode_as(const kernels::Chain& chain, std::span<const codec::Packet> packets,
               Dtype value_dtype, kernels::DeviceKernels::Update how, cudaStream_t stream) {
  with_float(chain.dtype, [&](auto out) {
    with_float(value_dtype, [&](auto value) {
      using T = typename decltype(out)::type;
      using V = typename decltype(value)::type;
      each_decoding<Wide<T>>(chain, packets, stream, [&](const Decoding& d, const gpu::Launch& l) {
        launch<decode<kUpdate, T, V>>("decode", l, d, static_cast<Wide<T>>(how.scale),
                                      static_cast<Wide<T>>(how.lr));
      });
    });
  });
}

}  // namespace

void CudaKernels::dgc_rollback(const kernels::DgcTables& tables, const float* found_inf,
                               kernels::Queue queue) {
  const OnDevice on(queue);
  with_wide(tables.dtype, [&](auto v) {
    each_page(tables, [&](const SentPage& page) {
      launch<roll_back<typename decltype(v)::type>>(
          "roll_back", {page.selections * kBlocksEach, kThreads, stream_of(queue)}, page,
          found_inf);
    });
  });
}

void CudaKernels::momentum_mask(void* u, void* v, const Positions& where, kernels::Queue queue) {
  if (where.indices.empty()) return;
  const OnDevice on(queue);
  with_wide(where.dtype, [&](auto type) {
    using V = typename decltype(type)::type;
    launch<mask<V>>(
        "mask", {blocks_for(where.indices.size(), kThreads), kThreads, stream_of(queue)},
        static_cast<V*>(u), static_cast<V*>(v), where.indices.data(),
        static_cast<unsigned>(where.indices.size()), static_cast<unsigned>(where.count));
  });
}

void CudaKernels::scatter_add(kernels::TypedArray out, const codec::Packet& packet,
                              Dtype value_dtype, double scale, kernels::Queue queue) {
  if (packet.count == 0) return;
  const OnDevice on(queue);
  with_float(out.dtype, [&](auto to) {
    with_float(value_dtype, [&](auto value) {
      using T = typename decltype(to)::type;
      launch<scatter<T, typename decltype(value)::type>>(
          "scatter", {blocks_for(packet.count, kThreads), kThreads, stream_of(queue)},
          static_cast<T*>(out.data), static_cast<unsigned>(out.count), entries(packet),
          static_cast<Wide<T>>(scale));
    });
  });
}

void CudaKernels::decode_sum(const kernels::Chain& out, std::span<const codec::Packet> packets,
                             Dtype value_dtype, double scale, kernels::Queue queue) {
  const OnDevice on(queue);
  decode_as<false>(out, packets, value_dtype, {.lr = 0, .scale = scale}, stream_of(queue));
}

void CudaKernels::decode_update(const kernels::Chain& param, std::span<const codec::Packet> packets,
                                Dtype value_dtype, Update update, kernels::Queue queue) {
  const OnDevice on(queue);
  decode_as<true>(param, packets, value_dtype, update, stream_of(queue));
}

void CudaKernels::encode(const codec::Packet& packet, const Encoding& encoding,
                         kernels::Queue queue) {
  const OnDevice on(queue);
  EncodedPacket to{};
  to.bytes = encoding.out;
  to.values = encoding.out + codec::kPacketHeaderBytes;
  to.padding_begin = codec::kPacketHeaderBytes + packet.count * bytes_of(encoding.value_dtype);
  to.padding_end = codec::raw_indices_offset(packet.count, encoding.value_dtype);
  to.indices = reinterpret_cast<int32_t*>(encoding.out + to.padding_end);
  to.header.k = packet.count;
  to.header.count = encoding.count;
  to.header.value_dtype = encoding.value_dtype;
  with_wide(encoding.dtype, [&](auto from) {
    with_float(encoding.value_dtype, [&](auto value) {
      using V = typename decltype(from)::type;
      launch<write_packet<typename decltype(value)::type, V>>(
          "write_packet", {blocks_for(packet.count, kThreads), kThreads, stream_of(queue)}, to,
          entries(packet), static_cast<V*>(encoding.residual),
          static_cast<unsigned>(encoding.count));
    });
  });
}

}  // namespace pycomm::cuda
