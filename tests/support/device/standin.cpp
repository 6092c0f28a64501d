// A device that is not the CPU, for machines that have none: memory of its own, and every operator by the CPU's.
//
// Law: its memory can be read and written while an operator runs, and at no other time: whoever follows one of its
// pointers from elsewhere is stopped by the operating system. A tensor of the CPU that meets one of the device is an
// error, but for single numbers and indices, as on a GPU. Results are the CPU's, bit for bit, but for random numbers:
// they are drawn from a generator of its own. Copies that nobody waits for, to and from pinned memory, come late.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS{c10::DispatchKey::PrivateUse1};
const c10::Device HERE{KIND, 0};

// ---- Memory: whole pages, which nobody may touch; how much there is, and was at most.

struct Pages {
  size_t bytes;  // asked for
  size_t mapped;
  int open;
};

std::mutex lock;
std::map<char*, Pages> memory;  // by where it begins
size_t taken = 0, most = 0;

void release(void* at) {
  if (!at) return;
  std::lock_guard<std::mutex> guard(lock);
  auto found = memory.find(static_cast<char*>(at));
  taken -= found->second.bytes;
  munmap(at, found->second.mapped);
  memory.erase(found);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = nullptr;
    if (bytes) {
      const size_t page = sysconf(_SC_PAGESIZE), mapped = (bytes + page - 1) / page * page;
      at = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "the stand-in has no memory left");
      std::lock_guard<std::mutex> guard(lock);
      memory[static_cast<char*>(at)] = {bytes, mapped, 0};
      taken += bytes;
      most = std::max(most, taken);
    }
    return {at, at, &release, HERE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* into, const void* from, size_t bytes) const override;
};
Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator)

// While it lives, the pages of a tensor may be read and written.
struct Open {
  char* at = nullptr;
  explicit Open(const void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = memory.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (!pointer || found == memory.begin()) return;
    --found;
    if (pointer >= found->first + found->second.mapped) return;  // of the CPU
    at = found->first;
    if (!found->second.open++) mprotect(at, found->second.mapped, PROT_READ | PROT_WRITE);
  }
  Open(const Open&) = delete;
  ~Open() {
    if (!at) return;
    std::lock_guard<std::mutex> guard(lock);
    auto& pages = memory.at(at);
    if (!--pages.open) mprotect(at, pages.mapped, PROT_NONE);
  }
};

void Allocator::copy_data(void* into, const void* from, size_t bytes) const {
  Open first(into), second(from);
  default_copy_data(into, from, bytes);
}

// Memory of the CPU that a device reads and writes by itself.
std::map<char*, size_t> pinned;

void unpin(void* at) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(static_cast<char*>(at));
  std::free(at);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = pinned.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  return pointer && found != pinned.begin() && pointer < (--found)->first + found->second;
}

struct Pinning final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? std::malloc(bytes) : nullptr;
    std::lock_guard<std::mutex> guard(lock);
    if (at) pinned[static_cast<char*>(at)] = bytes;
    return {at, at, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* into, const void* from, size_t bytes) const override { default_copy_data(into, from, bytes); }
};
Pinning pinning;

// ---- Operators: those that make tensors and views, those that copy; and all others.

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU, to be used while it is open.
at::Tensor as_of_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  void* at = const_cast<void*>(tensor.storage().data());
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  auto bytes = at::from_blob(at, {static_cast<int64_t>(tensor.storage().nbytes())}, options.dtype(at::kByte));
  auto same = at::empty({0}, options);
  same.set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

void copy_now(const at::Tensor& from, const at::Tensor& into) {
  at::AutoDispatchBelowADInplaceOrView below;
  Open first(from.storage().data()), second(into.storage().data());
  as_of_cpu(into).copy_(as_of_cpu(from));
}

// Copies that nobody waits for are made when the next operator runs, or somebody does wait.
std::vector<std::pair<at::Tensor, at::Tensor>> late;

void catch_up() {
  for (const auto& [from, into] : std::exchange(late, {})) copy_now(from, into);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& into, bool without_waiting) {
  if (!from.numel() && !into.numel()) return into;
  catch_up();
  const auto& of_cpu = from.device().is_cpu() ? from : into;
  if (without_waiting && is_pinned(of_cpu.storage().data())) {
    if (into.device().is_cpu()) std::memset(into.storage().mutable_data(), 0xff, into.storage().nbytes());
    late.emplace_back(from, into);
  } else {
    copy_now(from, into);
  }
  return into;
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  int64_t entries = 1;
  for (auto each : size) entries *= each;
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t needed = (self.storage_offset() + entries) * self.itemsize();
  if (entries && needed > storage->nbytes()) {
    auto grown = allocator.allocate(needed);
    if (storage->nbytes()) allocator.copy_data(grown.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr(std::move(grown));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& into) {
  if (into.sizes() != from.sizes()) into.resize_(from.sizes());
  return copy_from(from, into, false);
}

at::Tensor& set_(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.empty()) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  else self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  return set_(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator, true), 0, {0}, {});
}

void check(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  const bool takes_indices = op.schema().name().find("index") != std::string::npos;
  bool here = false, there = false;
  auto look = [&](const at::Tensor& each, bool is_written) {
    if (!each.defined()) return;
    here |= each.device().type() == KIND;
    there |= each.device().is_cpu() && (each.dim() || is_written);
  };
  for (size_t at = 0; at < values.size(); ++at) {
    const auto* alias = arguments[at].alias_info();
    const bool is_written = alias && alias->isWrite();
    const auto& value = values[at];
    if (value.isTensor()) look(value.toTensor(), is_written);
    else if (value.isTensorList()) for (const auto& each : value.toTensorVector()) look(each, is_written);
    else if (value.isList())
      for (const c10::IValue& each : value.toListRef())
        if (each.isTensor() && !(takes_indices && arguments[at].name() == "indices" && each.toTensor().is_cpu()))
          look(each.toTensor(), is_written);
  }
  TORCH_CHECK(!here || !there, "Expected all tensors to be on the same device, but found at least two devices, ", HERE,
              " and cpu! (", op.schema().name(), ")");
}

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) {
    device_ = HERE;
    key_set_ = KEYS;
  }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<Generator>(c10::detail::getNonDeterministicRandom());
  return generator;
}

// While it lives, the CPU's generator is where one of the device is, which follows it.
struct Drawing {
  at::Generator of_cpu = at::detail::getDefaultCPUGenerator(), own;
  at::Tensor before = of_cpu.get_state();
  explicit Drawing(at::Generator from) : own(std::move(from)) { of_cpu.set_state(own.get_state()); }
  Drawing(const Drawing&) = delete;
  ~Drawing() {
    own.set_state(of_cpu.get_state());
    of_cpu.set_state(before);
  }
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check(op, *stack);
  catch_up();
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  auto from = default_generator();
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size()))
    if (value.isGenerator()) from = std::exchange(const_cast<c10::IValue&>(value), c10::IValue()).toGenerator();
  TORCH_CHECK(from.device() == HERE, "Expected a 'standin' device type for generator but found '", from.device(), "'");
  Drawing drawing(from);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// Other devices than torch's own are asked for convolutions by these names.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef more, int64_t groups) {
  TORCH_CHECK(weight.device() == x.device(), "Expected all tensors to be on the same device: convolution");
  std::optional<at::Tensor> added = bias && bias->defined() ? std::optional(bias->cpu()) : std::nullopt;
  return at::convolution(x.cpu(), weight.cpu(), added, stride, padding, dilation, transposed, more, groups).to(HERE);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& slope, const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef more, int64_t groups,
    std::array<bool, 3> wanted) {
  const int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  auto [first, second, third] = at::convolution_backward(slope.cpu(), x.cpu(), weight.cpu(), {{outputs}}, stride,
                                                         padding, dilation, transposed, more, groups, wanted);
  auto back = [](const at::Tensor& each) { return each.defined() ? each.to(HERE) : each; };
  return {back(first), back(second), back(third)};
}

// Its statistics change, which its schema does not say.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto there = [](const std::optional<at::Tensor>& each) {
    return each && each->defined() ? std::optional(each->cpu()) : std::nullopt;
  };
  const auto means = there(mean), variances = there(variance);
  auto [y, first, second] =
      at::native_batch_norm(x.cpu(), there(weight), there(bias), means, variances, training, momentum, eps);
  if (training && means) mean->copy_(*means);
  if (training && variances) variance->copy_(*variances);
  return {y.to(HERE), first.to(HERE), second.to(HERE)};
}

// Of whole numbers, too, as on a GPU.
at::Tensor histc(const at::Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return at::histc(x.cpu().to(at::kDouble), bins, low, high).to(x.options());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize_);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("unfold", &at::native::unfold);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &set_);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &set_to_nothing);
  library.impl("convolution_overrideable", &convolution);
  library.impl("native_batch_norm", &batch_norm);
  library.impl("histc", &histc);
  library.impl("convolution_backward_overrideable", &convolution_backward);
}

// Under autocast products are of halves, as on a GPU.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

// ---- What torch asks a device for: there is one, with one stream.

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return HERE; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinning; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto grown = allocator.allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept) allocator.copy_data(grown.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, HERE); }
  void synchronizeDevice(const c10::DeviceIndex) const override { catch_up(); }
  void synchronizeStream(const c10::Stream&) const override { catch_up(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

extern "C" size_t standin_taken() { return taken; }
extern "C" size_t standin_most() { return most; }
extern "C" void standin_forget() { most = taken; }
extern "C" void standin_synchronize() { catch_up(); }
extern "C" void standin_seed(uint64_t seed) {
  auto generator = default_generator();
  generator.set_current_seed(seed);
}
extern "C" size_t standin_state(uint8_t* into) {
  const auto state = default_generator().get_state();
  if (into) std::memcpy(into, state.data_ptr(), state.nbytes());
  return state.nbytes();
}
extern "C" void standin_set_state(const uint8_t* from) {
  auto generator = default_generator();
  auto state = at::empty({static_cast<int64_t>(standin_state(nullptr))}, at::kByte);
  std::memcpy(state.data_ptr(), from, state.nbytes());
  generator.set_state(state);
}
