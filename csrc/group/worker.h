// Whose turn it is: one caller at a time, and behind it the asynchronous calls, in order, on one
// thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "group/group.h"

namespace pycomm {

class Worker {
 public:
  using Body = std::function<void()>;
  using Then = std::function<void(std::exception_ptr)>;

  // `interrupted` is asked while a caller waits for its turn or for a work.
  explicit Worker(std::function<bool()> interrupted) : interrupted_(std::move(interrupted)) {}
  ~Worker();

  // Runs `body` on this thread when everything started before is over. InvalidArgument if another
  // thread is inside.
  void run(const Body& body);
  std::shared_ptr<Work> start(Body body, Then then);
  // True if a call runs or waits.
  bool busy() const;
  // Ends the thread when what was started is over.
  void join();

 private:
  class Started;
  void loop();

  std::function<bool()> interrupted_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Started>> queue_;
  bool caller_inside_ = false, worker_inside_ = false, ending_ = false;
  std::thread thread_;
};

}  // namespace pycomm
