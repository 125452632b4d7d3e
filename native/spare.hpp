// Spare memory that is lent, returned and lent again, because the first touch of new memory is slow.
#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace zs {

class Spare : public std::enable_shared_from_this<Spare> {
  struct Block {
    std::byte* data = nullptr;
    size_t nbytes = 0;
  };

 public:
  // One block on loan; goes back by itself.
  class Loan {
   public:
    Loan() = default;
    Loan(Loan&&) noexcept = default;
    Loan& operator=(Loan&&) = delete;
    ~Loan();
    std::byte* data() const { return block_.data; }

   private:
    friend class Spare;
    Loan(std::shared_ptr<Spare> owner, Block block) : owner_(std::move(owner)), block_(block) {}
    std::shared_ptr<Spare> owner_;
    Block block_;
  };

  Spare() = default;
  Spare(const Spare&) = delete;
  Spare& operator=(const Spare&) = delete;
  ~Spare();
  Loan lend(size_t nbytes);  // page aligned; throws std::bad_alloc

 private:
  void take_back(Block block) noexcept;
  std::mutex mutex_;
  std::vector<Block> idle_;
};

}  // namespace zs
