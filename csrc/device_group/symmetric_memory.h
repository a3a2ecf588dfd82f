// Regions of device memory that the ranks of a host map, for all-reduce in one kernel:
// device/symmetric.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/symmetric.h"
#include "group/group.h"

namespace pycomm::device_group {

struct RankRegion;

class SymmetricMemory {
 public:
  // Collective over `host`, whose ranks are on one host, each with its own device. Throws errors of
  // `host`. If a rank cannot map the memory of another, no rank has regions: see why_not().
  SymmetricMemory(group::Group& host, std::shared_ptr<device::Device> device,
                  std::chrono::nanoseconds timeout);
  ~SymmetricMemory();  // aborts
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  // Empty if all ranks have regions.
  const std::string& why_not() const { return why_not_; }
  // Enqueues the call. `captured`: into a graph, which may use the regions as long as it exists.
  void all_reduce(const device::SymmetricAllReduce& call, void* stream, bool captured);
  uint64_t calls() const { return calls_; }
  uint64_t bytes_sent() const { return bytes_sent_; }  // to other ranks

  // Any thread. Kernels that wait for other ranks end, without a result.
  void abort() noexcept;
  bool aborted();
  // Call it when all enqueued calls are complete: other ranks then store nothing more here.
  void close() noexcept;

 private:
  struct Offer;
  void allocate(Offer& mine, bool for_processes);
  void map(const std::vector<Offer>& offers);
  std::vector<Offer> exchange(group::Group& host, Offer& mine, std::chrono::nanoseconds timeout);

  std::shared_ptr<device::Device> device_;
  std::shared_ptr<device::SymmetricDevice> operations_;
  std::string why_not_;
  std::vector<void*> imported_;
  device::SymmetricRegions regions_;
  uint64_t calls_ = 0, bytes_sent_ = 0;
  std::mutex mutex_;                    // guards the members below
  std::unique_ptr<RankRegion> region_;  // none after close()
  bool captured_ = false, aborted_ = false;
};

}  // namespace pycomm::device_group
