#include "shared/buffer_exchange.h"

#include <algorithm>
#include <cstring>

namespace pycomm::shared {
namespace {

// Below this size the exchange saves nothing over slots.
constexpr size_t kMinBytes = size_t{16} << 10;

uint64_t address_of(const void* at) { return reinterpret_cast<uintptr_t>(at); }

}  // namespace

// Bytes of every rank's arrays that peers access. Both 0: the operation always uses slots.
struct BufferExchange::Needed {
  size_t input = 0, output = 0;

  static Needed of(const engine::Job& job, int size);
  size_t most() const { return std::max(input, output); }
};

BufferExchange::Needed BufferExchange::Needed::of(const engine::Job& job, int size) {
  const size_t bytes = job.count * job.element_bytes;
  switch (job.operation) {
    case Operation::all_reduce:
      return {bytes, bytes};
    case Operation::broadcast:
      return {.output = bytes};
    case Operation::all_gather:
      return {.input = bytes};
    case Operation::reduce_scatter:
      return {.input = bytes * static_cast<size_t>(size)};
    case Operation::reduce:
    case Operation::gather:
    case Operation::scatter:
    case Operation::all_to_all:
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return {};
}

// Contents of the cache line of the flag. Addresses belong to the rank's own process.
struct BufferExchange::BufferDescriptor {
  uint64_t input, output;
  uint64_t heap;  // start of its heap
  // 1: all arrays that peers access are in its heap. No bool: another rank wrote it.
  uint64_t mapped;
};

bool BufferExchange::applies_to(const engine::Job& job, const SharedMemoryRegion& region) {
  return region.has_heaps() && job.parts == 0 && Needed::of(job, region.size()).most() > kMinBytes;
}

BufferExchange::BufferExchange(engine::Engine& engine, SharedMemoryRegion& region,
                               const engine::Job& job)
    : FlagTask(engine, region, job, 1) {}

bool BufferExchange::advance() {
  awaited_ = collectives::kNoRank;
  if (!published_) {
    if (!may_fill(first_)) return false;
    publish_buffer();
    return true;
  }
  for (int peer = 0; peer < size_; ++peer)
    if (!has_filled(peer, first_)) return false;
  choose_access_mode();
  exchanged_ = true;
  return true;
}

// A misaligned array counts as not mapped, because peers would have to process it.
void BufferExchange::publish_buffer() {
  static_assert(sizeof(BufferDescriptor) <= kTinyBytes);
  const Needed needed = Needed::of(job_, size_);
  const auto is_mapped = [&](const std::byte* array, size_t bytes) {
    const auto offset = region_.heap(rank_).offset_of(array, bytes);
    return bytes == 0 || (offset && *offset % job_.element_bytes == 0);
  };
  const bool mapped = is_mapped(job_.input, needed.input) && is_mapped(job_.output, needed.output);
  const BufferDescriptor mine{
      .input = address_of(job_.input),
      .output = address_of(job_.output),
      .heap = address_of(region_.heap(rank_).base.get()),
      .mapped = mapped ? 1U : 0U,
  };
  std::memcpy(region_.own().filled[first_ % kSlots].tiny.data(), &mine, sizeof mine);
  publish_filled(first_);
  published_ = true;
}

BufferExchange::BufferDescriptor BufferExchange::descriptor_of(int peer) const {
  BufferDescriptor descriptor;
  std::memcpy(&descriptor, region_.of(peer).filled[first_ % kSlots].tiny.data(), sizeof descriptor);
  return descriptor;
}

RemoteBuffer BufferExchange::remote_buffer_of(int peer, const BufferDescriptor& descriptor) const {
  if (descriptor.mapped == 0) return {};
  const os::HeapView& heap = region_.heap(peer);
  const auto at = [&](uint64_t address, size_t bytes) -> std::byte* {
    const uint64_t offset = address - descriptor.heap;
    if (bytes == 0) return nullptr;
    engine_.require_valid(region_.member(peer),
                          heap.holds(offset, bytes) && offset % job_.element_bytes == 0,
                          "an array address outside its heap");
    return heap.base.get() + offset;
  };
  const Needed needed = Needed::of(job_, size_);
  return {.input = at(descriptor.input, needed.input),
          .output = at(descriptor.output, needed.output)};
}

void BufferExchange::choose_access_mode() {
  bool all_mapped = true;
  for (int peer = 0; peer < size_; ++peer) {
    const BufferDescriptor descriptor = descriptor_of(peer);
    all_mapped &= descriptor.mapped != 0;
    buffers_.push_back(remote_buffer_of(peer, descriptor));
  }
  mode_ = all_mapped ? AccessMode::zero_copy : AccessMode::staged;
}

}  // namespace pycomm::shared
