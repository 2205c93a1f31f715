// Runs independent items on the calling thread and a thread pool's.

#ifndef ZYFA_FFI_WORK_QUEUE_H_
#define ZYFA_FFI_WORK_QUEUE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace zyfa {

// Items 0..items-1, each taken once, in order, through one Cursor a thread.
//
// The caller works too and waits only for items that somebody has started,
// never for a task that the pool has yet to start. So a pool that is busy, with
// other calls or with the caller itself, costs speed and cannot deadlock. A
// helper that comes late finds nothing to do and touches only this queue, which
// it owns.
class WorkQueue {
 public:
  explicit WorkQueue(int64_t items) : items_(items) {}

  class Cursor {
   public:
    explicit Cursor(WorkQueue& queue) : queue_(queue) {}
    ~Cursor() { Finish(); }
    Cursor(const Cursor&) = delete;
    Cursor& operator=(const Cursor&) = delete;

    // Reports the previous item done; -1 when none is left.
    int64_t Next() {
      Finish();
      const int64_t item = queue_.next_.fetch_add(1);
      holds_item_ = item < queue_.items_;
      return holds_item_ ? item : -1;
    }

   private:
    void Finish() {
      if (holds_item_) queue_.FinishItem();
      holds_item_ = false;
    }

    WorkQueue& queue_;
    bool holds_item_ = false;
  };

  void WaitUntilFinished() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_finished_.wait(lock, [this] { return finished_.load() == items_; });
  }

 private:
  void FinishItem() {
    if (finished_.fetch_add(1) + 1 == items_) {
      // Taking the lock keeps the waiter from missing the signal.
      std::lock_guard<std::mutex> lock(mutex_);
      all_finished_.notify_all();
    }
  }

  const int64_t items_;
  std::atomic<int64_t> next_ = 0;
  std::atomic<int64_t> finished_ = 0;
  std::mutex mutex_;
  std::condition_variable all_finished_;
};

}  // namespace zyfa

#endif  // ZYFA_FFI_WORK_QUEUE_H_
