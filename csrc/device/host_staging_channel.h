// What a lane of the stream engine sends to ranks that its communicator does not join, and receives
// from them: staged in host memory that the device reads and writes, from where a host transport
// sends it.
//
//   lane              ... | copy to the host | call | NCCL near by | wait | copy to the device |
//   ... callback thread                             the messages of the stage
//
// Called by stream_engine.cpp.
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

namespace pycomm {

// A message: to `peer`, or from it.
struct HostMessage {
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
  // All of them at once; those of one peer in order. Throws what ends the group.
  virtual void exchange(std::span<const HostMessage> messages,
                        std::chrono::nanoseconds timeout) = 0;
  // From any thread: what is under way ends, here and with the peers.
  virtual void abort(const std::string& reason) noexcept = 0;
  virtual void close() noexcept = 0;  // when nothing is under way
};

class HostStagingChannel {
 public:
  HostStagingChannel(std::shared_ptr<Device> device, void* stream,
                     std::unique_ptr<HostTransport> transport);
  ~HostStagingChannel();  // ends what is under way
  HostStagingChannel(const HostStagingChannel&) = delete;
  HostStagingChannel& operator=(const HostStagingChannel&) = delete;

  // Of host memory, which messages of so many bytes take when they travel at once.
  static size_t staged_bytes(size_t bytes);
  // Before begin(): that there is so much of it. Throws Unsupported where `caller`, a stream, is
  // being captured and there is too little.
  void reserve(size_t bytes, void* caller) { staging_.reserve(bytes, caller); }

  // Arrays lie on the device. What arrives is there for what the stream does behind end(); between
  // the two comes what need not wait for it. One thread at a time.
  void begin(std::span<const HostMessage> messages, std::chrono::nanoseconds timeout);
  void end();

  // From any thread. Why messages have not arrived: known before the stream goes on without them.
  std::optional<Error> trouble();
  void abort(const std::string& reason) noexcept;
  void close() noexcept { transport_->close(); }

 private:
  void exchange(std::span<const HostMessage> messages, std::chrono::nanoseconds timeout) noexcept;

  struct CopyBack {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  std::shared_ptr<Device> device_;
  void* stream_;
  std::unique_ptr<HostTransport> transport_;
  GrowableBuffer staging_;
  std::vector<CopyBack> copies_;  // of what has begun
  std::mutex mutex_;              // guards error_
  std::optional<Error> error_;    // the first one
  HostCallbackThread callbacks_;  // the last member: its thread ends before what it uses
};

}  // namespace pycomm
