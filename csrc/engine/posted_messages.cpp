#include "engine/posted_messages.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/deadline.h"

namespace pycomm::engine {

void PostedMessages::begin_collective() {
  std::unique_lock lock(mutex_);
  ++collectives_waiting_;
  if (driven_) wake_.notify();
  changed_.wait(lock, [&] { return !driven_; });
  --collectives_waiting_;
  driven_ = true;
  message_drives_ = false;
}

void PostedMessages::end_drive() {
  const std::lock_guard lock(mutex_);
  driven_ = false;
  if (!threads_.empty() || collectives_waiting_ > 0) changed_.notify_all();
}

void PostedMessages::run(Message& message, const std::function<bool()>& drive,
                         const std::function<void()>& check) {
  std::unique_lock lock(mutex_);
  threads_.push_back(std::this_thread::get_id());
  struct Leave {
    PostedMessages& posted;
    std::unique_lock<std::mutex>& lock;
    ~Leave() {
      if (!lock) lock.lock();
      posted.threads_.erase(std::ranges::find(posted.threads_, std::this_thread::get_id()));
      posted.changed_.notify_all();
    }
  } const leave{*this, lock};
  const auto may_drive = [&] { return !driven_ && collectives_waiting_ == 0; };
  while (!message.done) {
    if (may_drive()) {
      driven_ = message_drives_ = true;
      std::erase(messages_, &message);
      posted_ = !messages_.empty();
      lock.unlock();
      struct EndDrive {
        PostedMessages& posted;
        ~EndDrive() { posted.end_drive(); }
      };
      {
        const EndDrive ends{*this};
        if (drive()) return;
      }
      lock.lock();
      continue;
    }
    if (std::ranges::find(messages_, &message) == messages_.end()) {
      messages_.push_back(&message);
      posted_ = true;
      if (driven_) wake_.notify();
    }
    if (changed_.wait_for(lock, kPollInterval, [&] { return message.done || may_drive(); }))
      continue;
    lock.unlock();
    check();
    lock.lock();
  }
  if (message.error) std::rethrow_exception(message.error);
}

void PostedMessages::begin(Message& message) {
  if (std::exchange(message.begun, true)) return;
  message.task.begin();
  if (message.task.sending_to() != collectives::kNoRank) mailbox_.set_sending(&message.task, true);
}

// A Mismatch of the message alone ends only that. One that starts a new epoch is the driver's.
bool PostedMessages::advance_all(const StopSignal& stop) {
  const std::lock_guard lock(mutex_);
  bool moved = false;
  for (size_t i = 0; i < messages_.size();) {
    Message& one = *messages_[i];
    const uint16_t epoch = calls_.epoch();
    bool ended = false;
    try {
      begin(one);
      moved |= one.task.advance();
      ended = one.task.done() || (one.task.can_be_suspended() && stop.suspended());
    } catch (const Mismatch&) {
      if (calls_.epoch() != epoch) throw;
      one.error = std::current_exception();
      ended = true;
    }
    ended ? end(one) : static_cast<void>(++i);
  }
  return moved;
}

void PostedMessages::end(Message& message) {
  mailbox_.end_receives(&message.task, message.task.can_be_suspended());
  std::erase(messages_, &message);
  posted_ = !messages_.empty();
  message.done = true;
  changed_.notify_all();
}

void PostedMessages::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  while (!messages_.empty()) {
    // Copies of an Error share their text, which each thread frees.
    messages_.front()->error =
        std::make_exception_ptr(Error(error.kind(), std::string(error.what()), error.fields()));
    end(*messages_.front());
  }
}

bool PostedMessages::is_used_by_others() const {
  return std::ranges::any_of(threads_,
                             [](std::thread::id one) { return one != std::this_thread::get_id(); });
}

bool PostedMessages::busy() {
  const std::lock_guard lock(mutex_);
  return is_used_by_others();
}

void PostedMessages::join() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !is_used_by_others(); });
}

}  // namespace pycomm::engine
