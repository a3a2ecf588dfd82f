// Messages of a channel of the stream engine to and from ranks outside its communicator. They are
// staged in host memory that the device reads and writes; a host transport sends and receives them.
//
//   channel stream   | copy to the host | call | NCCL messages | wait | copy to the device |
//   callback thread                             the host messages of the stage
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/errors.h"
#include "device/device.h"
#include "device/growable_buffer.h"
#include "device/host_callback_thread.h"

namespace pycomm::device {

// A message to `peer`, or from it. Where `data` is stored depends on the function.
struct PeerMessage {
  int peer;
  bool sends;
  std::byte* data;
  size_t bytes;
};

// Exchanges messages between arrays in host memory. One staging channel owns it.
class HostTransport {
 public:
  HostTransport() = default;
  HostTransport(const HostTransport&) = delete;
  HostTransport& operator=(const HostTransport&) = delete;
  virtual ~HostTransport() = default;
  // Exchanges all messages concurrently; those of one peer in order. Throws errors that end the
  // group.
  virtual void exchange(std::span<const PeerMessage> messages,
                        std::chrono::nanoseconds timeout) = 0;
  // Thread-safe. Ends the current exchange, here and on the peers.
  virtual void abort(const std::string& reason) noexcept = 0;
  virtual void close() noexcept = 0;  // no exchange may be in progress
};

class HostStagingChannel {
 public:
  HostStagingChannel(std::shared_ptr<Device> device, void* stream,
                     std::unique_ptr<HostTransport> transport);
  ~HostStagingChannel();  // aborts a running exchange
  HostStagingChannel(const HostStagingChannel&) = delete;
  HostStagingChannel& operator=(const HostStagingChannel&) = delete;

  // Host memory that a message of `bytes` takes.
  static size_t staged_bytes(size_t bytes);
  // Call it before begin(): ensures that much host memory. Throws Unsupported if it would have to
  // grow while `caller`, a stream, is being captured.
  void reserve(size_t bytes, void* caller) { staging_.reserve(bytes, caller); }

  // The arrays of `messages` are on the device. Received data is visible to work enqueued after
  // end(). Work that need not wait is enqueued between the two. Not thread-safe.
  void begin(std::span<const PeerMessage> messages, std::chrono::nanoseconds timeout);
  void end();

  // Thread-safe. The error of a failed exchange; set before the stream continues without the
  // messages.
  std::optional<Error> async_error();
  void abort(const std::string& reason) noexcept;
  void close() noexcept { transport_->close(); }

 private:
  void exchange(std::span<const PeerMessage> messages, std::chrono::nanoseconds timeout) noexcept;

  struct CopyBack {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  std::shared_ptr<Device> device_;
  void* stream_;
  std::unique_ptr<HostTransport> transport_;
  GrowableBuffer staging_;
  std::vector<CopyBack> copies_;  // of the current begin()
  std::mutex mutex_;              // guards error_
  std::optional<Error> error_;    // the first one
  HostCallbackThread callbacks_;  // the last member, because its thread uses the others
};

}  // namespace pycomm::device
