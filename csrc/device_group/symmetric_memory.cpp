#include "device_group/symmetric_memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <span>
#include <utility>

#include "core/errors.h"
#include "os/random.h"

namespace pycomm::device_group {

// What one rank contributes, of its device. Never freed: other ranks may map it, and CUDA does not
// define what happens to memory that is freed while another process maps it. The pool has those of
// closed groups.
struct RankRegion {
  int device;
  size_t bytes;
  std::byte* memory;
  uint32_t* aborted;  // in host memory; 0 until abort()
};

namespace {

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<RankRegion>> regions;
};
Pool& pool() {
  static auto& all = *new Pool;  // never destroyed
  return all;
}

std::unique_ptr<RankRegion> take_region(device::Device& device, size_t bytes) {
  {
    const std::lock_guard lock(pool().mutex);
    auto& regions = pool().regions;
    const auto found = std::ranges::find_if(regions, [&](const auto& one) {
      return one->device == device.index() && one->bytes == bytes;
    });
    if (found != regions.end()) {
      auto taken = std::move(*found);
      regions.erase(found);
      return taken;
    }
  }
  auto made = std::make_unique<RankRegion>(device.index(), bytes, nullptr, nullptr);
  made->aborted = static_cast<uint32_t*>(device.allocate_host(sizeof(uint32_t)));
  *made->aborted = 0;
  made->memory = static_cast<std::byte*>(device.allocate(bytes));
  return made;
}

// Random, because processes in different containers may have one id.
const std::array<uint8_t, 32>& this_process() {
  static const std::array<uint8_t, 32> id = os::random_bytes();
  return id;
}

}  // namespace

// What ranks tell each other.
struct SymmetricMemory::Offer {
  std::array<uint8_t, 32> process;
  int32_t device;
  uint32_t blocks;
  std::byte* memory;  // for ranks of the same process
  device::MemoryHandle handle;
  std::array<char, 256> failure;  // empty if there is none

  void fail(const std::string& why) {
    std::copy_n(why.begin(), std::min(why.size(), failure.size() - 1), failure.begin());
  }
};

SymmetricMemory::SymmetricMemory(group::Group& host, std::shared_ptr<device::Device> device,
                                 std::chrono::nanoseconds timeout)
    : device_(std::move(device)), operations_(device_->symmetric()) {
  Offer mine{.process = this_process(),
             .device = device_->index(),
             .blocks = static_cast<uint32_t>(device_->multiprocessors()),
             .memory = nullptr,
             .handle = {},
             .failure = {}};
  // A rank that fails tells the others, which wait for it.
  const auto attempt = [&](auto step) {
    try {
      step();
    } catch (const Error& error) {  // in why_not()
      mine.fail(error.what());
    }
  };
  if (!operations_) mine.fail("the device has no symmetric memory");
  if (host.size() > device::kMostSymmetricRanks)
    mine.fail("there are more than " + std::to_string(device::kMostSymmetricRanks) + " ranks");
  const auto offers = exchange(host, mine, timeout);
  if (!why_not_.empty()) return;
  regions_.rank = host.rank();
  regions_.blocks = std::ranges::min_element(offers, {}, &Offer::blocks)->blocks;
  regions_.by_rank.resize(offers.size());
  const bool for_processes =
      std::ranges::any_of(offers, [&](const Offer& one) { return one.process != mine.process; });
  attempt([&] { allocate(mine, for_processes); });
  const auto allocated = exchange(host, mine, timeout);
  if (!why_not_.empty()) return;
  attempt([&] { map(allocated); });
  (void)exchange(host, mine, timeout);
}

SymmetricMemory::~SymmetricMemory() {
  abort();
  // A kernel may use it, or that of another rank.
  [[maybe_unused]] const RankRegion* const kept = region_.release();
}

// By rank. Sets why_not_ if a rank failed.
std::vector<SymmetricMemory::Offer> SymmetricMemory::exchange(group::Group& host, Offer& mine,
                                                              std::chrono::nanoseconds timeout) {
  std::vector<Offer> all(static_cast<size_t>(host.size()));
  host.run({.operation = Operation::all_gather,
            .input = &mine,
            .output = all.data(),
            .count = sizeof(Offer),
            .timeout = timeout});
  for (size_t rank = 0; rank < all.size() && why_not_.empty(); ++rank)
    if (const char* const why = all[rank].failure.data(); *why != '\0')
      why_not_ = "rank " + std::to_string(rank) + ": " + why;
  return all;
}

// Clears the region before other ranks know its address.
void SymmetricMemory::allocate(Offer& mine, bool for_processes) {
  region_ =
      take_region(*device_, operations_->region_bytes(static_cast<int>(regions_.by_rank.size())));
  const device::Stream stream(device_);
  device_->clear(region_->memory, region_->bytes, stream.raw());
  device_->finish(stream.raw());
  regions_.aborted = region_->aborted;
  mine.memory = region_->memory;
  if (for_processes) mine.handle = operations_->export_memory(region_->memory);
}

void SymmetricMemory::map(const std::vector<Offer>& offers) {
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    const Offer& one = offers[rank];
    std::byte*& here = regions_.by_rank[rank];
    if (static_cast<int>(rank) == regions_.rank) {
      here = region_->memory;
    } else if (one.process == this_process()) {
      if (one.device != device_->index()) operations_->enable_access(one.device);
      here = one.memory;
    } else {
      imported_.push_back(operations_->import_memory(one.handle));
      here = static_cast<std::byte*>(imported_.back());
    }
  }
}

void SymmetricMemory::all_reduce(const device::SymmetricAllReduce& call, void* stream,
                                 bool captured) {
  {
    const std::lock_guard lock(mutex_);
    captured_ = captured_ || captured;
  }
  operations_->all_reduce(regions_, call, stream);
  const size_t bytes = call.count * bytes_of(call.dtype), others = regions_.by_rank.size() - 1;
  const bool two_shot = bytes > device::kOneShotBytes;
  ++calls_;
  bytes_sent_ += two_shot ? 2 * bytes * others / regions_.by_rank.size() : bytes * others;
}

void SymmetricMemory::abort() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  if (region_) std::atomic_ref(*region_->aborted).store(1);
}

bool SymmetricMemory::aborted() {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

void SymmetricMemory::close() noexcept {
  const std::lock_guard lock(mutex_);
  if (captured_ || aborted_ || !region_) return;
  for (void* const memory : imported_) operations_->close_import(memory);
  imported_.clear();
  const std::lock_guard pool_lock(pool().mutex);
  pool().regions.push_back(std::move(region_));
}

}  // namespace pycomm::device_group
