// Messages of several threads at once. One thread at a time drives the engine, and advances the
// messages of the other threads beside its own task:
//
//   a thread with    drives the engine                            until then
//   a collective     when no other thread does                    waits
//   a message        when no other thread does or waits for it    the driver advances the message
//
// A message that drives yields to a collective, whose driver then advances it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/call_sequence.h"
#include "engine/mailbox.h"
#include "engine/stop_signal.h"
#include "engine/task.h"
#include "os/wake_event.h"

namespace pycomm::engine {

// Any thread may call, unless stated otherwise.
class PostedMessages {
 public:
  struct Message {
    Task& task;
    bool begun = false;  // of the driver
    bool done = false;
    std::exception_ptr error{};
  };

  // `wake` is notified when there is a new message, or the driver must yield. Not `enabled`: one
  // thread at a time uses the engine, and no message is ever posted.
  PostedMessages(bool enabled, const CallSequence& calls, Mailbox& mailbox,
                 const os::WakeEvent& wake)
      : enabled_(enabled), calls_(calls), mailbox_(mailbox), wake_(wake) {}

  bool enabled() const { return enabled_; }

  // This thread drives for a collective, for the lifetime of the object.
  class Driver {
   public:
    explicit Driver(PostedMessages& posted) : posted_(posted) { posted_.begin_collective(); }
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;
    ~Driver() { posted_.end_drive(); }

   private:
    PostedMessages& posted_;
  };

  // Returns when the message is done; throws its error. `drive` advances it and the others, and
  // returns false if it yielded. `check` is called every 100 ms while another thread drives.
  void run(Message& message, const std::function<bool()>& drive,
           const std::function<void()>& check);

  // For the driver.
  void begin(Message& message);
  bool advance(const StopSignal& stop) {
    return posted_.load(std::memory_order_acquire) && advance_all(stop);
  }
  // Whether the driver has a message and must end its drive.
  bool must_yield() const { return message_drives_ && collectives_waiting_.load() > 0; }
  // Calls `visit` with the task of each message that waits.
  template <typename Visit>
  void visit(const Visit& visit) {
    if (!posted_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    for (const Message* one : messages_) visit(one->task);
  }
  // Ends all messages with the error.
  void fail(const Error& error);

  // Whether another thread has a message.
  bool busy();
  // Waits until no other thread has one.
  void join();

 private:
  void begin_collective();
  void end_drive();
  bool advance_all(const StopSignal& stop);
  void end(Message& message);
  bool is_used_by_others() const;

  const bool enabled_;
  const CallSequence& calls_;
  Mailbox& mailbox_;
  const os::WakeEvent& wake_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::vector<Message*> messages_;        // of the threads that wait, in the order of their calls
  std::vector<std::thread::id> threads_;  // that have messages
  bool driven_ = false;
  // Without the mutex: read by the driver, and written by the thread that becomes the driver.
  bool message_drives_ = false;
  std::atomic<bool> posted_{false};  // whether messages_ holds any
  std::atomic<int> collectives_waiting_{0};
};

}  // namespace pycomm::engine
