// The numbers by which the server of the TCP store recognizes a change that it already applied.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>

#include "rendezvous/store_frame.h"

namespace pycomm::rendezvous {

// Thread-safe.
class ChangeNumbers {
 public:
  // `client`: a random number that identifies this client.
  explicit ChangeNumbers(uint64_t client) : client_(client) {}

  // Numbers a request, which a call waits for during this object's lifetime.
  class InFlight {
   public:
    InFlight(ChangeNumbers& numbers, store_frame::Request& request);
    ~InFlight();
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;

   private:
    ChangeNumbers& numbers_;
    uint64_t number_;
  };

 private:
  uint64_t begin(store_frame::Request& request) {
    const std::lock_guard lock(mutex_);
    request.client = client_;
    request.number = next_++;
    in_flight_.insert(request.number);
    request.oldest = *in_flight_.begin();
    return request.number;
  }
  void end(uint64_t number) {
    const std::lock_guard lock(mutex_);
    in_flight_.erase(number);
  }

  std::mutex mutex_;
  uint64_t client_;
  uint64_t next_ = 1;
  std::set<uint64_t> in_flight_;
};

inline ChangeNumbers::InFlight::InFlight(ChangeNumbers& numbers, store_frame::Request& request)
    : numbers_(numbers), number_(numbers.begin(request)) {}

inline ChangeNumbers::InFlight::~InFlight() { numbers_.end(number_); }

}  // namespace pycomm::rendezvous
