#!/bin/sh
# Installs what building, testing and the demonstration need, on Debian 12 or later and Ubuntu 22.04 or later. May be
# run again at any time; prints nothing and changes nothing when everything is installed.
# shellcheck disable=SC1091
set -eu

RUST_VERSION_LEAST=1.88

# Building: a C tool chain for the eBPF parts. Guests: QEMU, Debian packages, file systems. Tests: slow disks, network
# name spaces, and a libvirt of which no daemon is started. Benchmarks: servers to compare the memory server with.
# Also a headless Chromium (98 MB to fetch, 290 MB installed), where the distribution has a package of one.
PACKAGES="build-essential pkg-config clang llvm libbpf-dev libelf-dev zlib1g-dev
    mmdebstrap debian-archive-keyring gpg uidmap cpio e2fsprogs xfsprogs btrfs-progs
    nbdkit libnbd-bin python3-libnbd fio iproute2
    libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients
    memcached redis-server"
QEMU_PACKAGES="qemu-system-x86 qemu-utils"
# In Debian. Ubuntu only has a snap; the tests then use another one if there is one (REMOCA_BROWSER), and else say that they did not run.
BROWSER=chromium-headless-shell
# Packages that start a daemon nobody here needs.
DAEMONS="memcached redis-server"

say() { echo "install-deps: $*" >&2; }
fail() { say "$*"; exit 1; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo > /dev/null; then
        sudo "$@"
    else
        fail "installing packages needs root: run this as root, or install sudo"
    fi
}

is_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2> /dev/null)" = installed ]; }

missing_of() {
    for package; do
        is_installed "$package" || echo "$package"
    done
}

# Succeeds if apt could install the package; `apt-cache show` also knows packages that others merely mention.
has_candidate() { LC_ALL=C apt-cache policy "$1" | grep -q '^ *Candidate: [^(]'; }

has_bpftool() { bpftool version > /dev/null 2>&1 || /usr/sbin/bpftool version > /dev/null 2>&1; }

apt_get() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@"
}

# Never removes an installed package: apt would solve a conflict that way.
install_packages() { apt_get install --no-install-recommends --no-remove "$@"; }

# Keeps packages from starting their daemons while they are installed, unless the machine has a rule of its own.
POLICY=/usr/sbin/policy-rc.d
policy_is_ours=no
forbid_daemons() {
    [ -e $POLICY ] && return
    policy_is_ours=yes
    printf '#!/bin/sh\nexit 101\n' | as_root tee $POLICY > /dev/null
    as_root chmod 755 $POLICY
}
scratch=$(mktemp -d)
clean_up() {
    rm -rf "$scratch"
    [ $policy_is_ours = no ] || as_root rm -f $POLICY
}
trap clean_up EXIT
trap 'exit 130' HUP INT TERM

disable_daemon() {
    if command -v systemctl > /dev/null; then
        as_root systemctl disable --now --quiet "$1" || say "$1 could not be disabled; it may start at the next boot"
    elif [ -e "/etc/init.d/$1" ]; then
        as_root update-rc.d "$1" disable
    fi
}

# If some QEMU packages came from backports, the rest must also come from there. The source is this machine's own Debian
# mirror with the suite changed, in a private folder: the machine's configuration stays as it is.
install_qemu_from_backports() {
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk -v suite="$codename" '$2 == suite && $3 == "main" { print $1; exit }')
    [ -n "$mirror" ] || fail "no apt source for $codename found; install $* by hand"
    options=
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ ! -e $keyring ] || options="[signed-by=$keyring] "
    chmod 755 "$scratch"
    for suite in "$codename" "$codename-backports"; do
        echo "deb ${options}$mirror $suite main"
    done > "$scratch/backports.list"
    set -- -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$scratch" -o APT::Get::List-Cleanup=0 "$@"
    apt_get -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$scratch" -o APT::Get::List-Cleanup=0 update
    install_packages -t "$codename-backports" "$@"
}

install_qemu() {
    # shellcheck disable=SC2046,SC2086
    set -- $(missing_of $QEMU_PACKAGES)
    [ $# -gt 0 ] || return 0
    if install_packages "$@"; then
        return 0
    fi
    [ "$system" = debian ] || fail "QEMU could not be installed, see above"
    say "the distribution's own QEMU does not fit what is installed; trying $codename-backports"
    install_qemu_from_backports "$@" seabios
}

# Debian has a package; on Ubuntu it comes with the kernel's tools, behind a wrapper that wants those of the running
# kernel.
install_bpftool() {
    if has_bpftool; then
        return 0
    fi
    if has_candidate bpftool; then
        install_packages bpftool
    else
        install_packages linux-tools-common linux-tools-generic
    fi
    if ! has_bpftool; then
        real=$(find /usr/lib/linux-tools/ -name bpftool | sort -V | tail -n 1)
        [ -n "$real" ] || fail "no bpftool found after installing linux-tools-generic"
        as_root ln -sf "$real" /usr/local/sbin/bpftool
    fi
}

# An architecture or a release without it (Debian 12 has it as an update) is no reason to stop.
install_browser() {
    # shellcheck disable=SC2046,SC2086
    set -- $(missing_of $BROWSER)
    [ $# -gt 0 ] || return 0
    has_candidate "$1" || { say "there is no package $1 here; the tests of the page will ask for a browser"; return 0; }
    install_packages "$@"
}

rust_is_new_enough() {
    PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
    cargo fmt --version > /dev/null 2>&1 && cargo clippy --version > /dev/null 2>&1 || return 1
    found=$(cargo --version 2> /dev/null | cut -d ' ' -f 2) || return 1
    [ -n "$found" ] || return 1
    least=$(printf '%s\n%s\n' "$RUST_VERSION_LEAST" "$found" | sort -V | head -n 1)
    [ "$least" = "$RUST_VERSION_LEAST" ]
}

install_rust() {
    if ! command -v rustup > /dev/null; then
        if has_candidate rustup; then
            install_packages rustup
        else
            install_rustup_from_its_site
            return
        fi
    fi
    rustup toolchain install stable --profile minimal --component clippy --component rustfmt ||
        fail "rustup could not fetch Rust; it needs https://static.rust-lang.org"
    rustup default stable
}

install_rustup_from_its_site() {
    # shellcheck disable=SC2046
    set -- $(missing_of curl ca-certificates)
    [ $# -eq 0 ] || install_packages "$@"
    curl --proto '=https' --tlsv1.2 -sSf --retry 2 https://sh.rustup.rs -o "$scratch/rustup-init.sh" ||
        fail "Rust $RUST_VERSION_LEAST or later is missing, and https://sh.rustup.rs cannot be reached. Install it by hand (https://rustup.rs) and run this again"
    sh "$scratch/rustup-init.sh" -y --quiet --profile minimal --component clippy --component rustfmt --default-toolchain stable ||
        fail "the Rust installer failed, see above"
    say "Rust is installed; open a new shell or run: . \"\$HOME/.cargo/env\""
}

system=$(. /etc/os-release && echo "$ID")
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
command -v apt-get > /dev/null || fail "this script needs apt-get; see its list of packages for other systems"

[ "$system" = debian ] || BROWSER=
# shellcheck disable=SC2086
missing=$(missing_of $PACKAGES $QEMU_PACKAGES $BROWSER)
if [ -n "$missing" ] || ! has_bpftool; then
    say "installing packages that are missing"
    apt_get update || fail "apt-get update failed; is the package mirror reachable?"
    # shellcheck disable=SC2086
    daemons=$(missing_of $DAEMONS)
    forbid_daemons
    # shellcheck disable=SC2046,SC2086
    set -- $(missing_of $PACKAGES)
    [ $# -eq 0 ] || install_packages "$@"
    install_qemu
    install_bpftool
    install_browser
    for daemon in $daemons; do
        disable_daemon "$daemon"
    done
fi
rust_is_new_enough || install_rust
