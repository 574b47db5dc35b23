#!/bin/sh
# mmdebstrap customize hook: turns the root tree $1 into a kernel, an initramfs and an ext4 image, all left in
# $1/lab-out for mmdebstrap to copy out. Runs as root of the build (real or in a user namespace), so ownership is right.
# From the caller: LAB_KERNEL_PACKAGE, LAB_GUEST_FILES (folder with the guest's own scripts).
set -eu
root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The kernel package is unpacked beside the root, not installed in it: no boot loader, no update scripts. It is never
# unpacked over the root either, where it would replace the /lib link of a merged-/usr system by a folder.
(
    cd "$work"
    APT_CONFIG=$MMDEBSTRAP_APT_CONFIG
    export APT_CONFIG
    package=$(apt-cache depends "$LAB_KERNEL_PACKAGE" | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
    [ -n "$package" ] || { echo "no kernel package behind $LAB_KERNEL_PACKAGE" >&2; exit 1; }
    apt-get -q -o APT::Sandbox::User=root download "$package"
    dpkg-deb -x "$package"_*.deb kernel
)
# Debian 13's packages have their modules below /usr, earlier ones do not.
modules=$work/kernel/usr/lib/modules
[ -d "$modules" ] || modules=$work/kernel/lib/modules
kver=$(basename "$modules"/*)
mkdir -p "$root/usr/lib/modules"
cp -a "$modules/$kver" "$root/usr/lib/modules/"
chroot "$root" depmod "$kver"

# The initramfs holds busybox and the modules that reach the root disk, in load order.
boot=$work/initramfs
mkdir -p "$boot/bin" "$boot/dev" "$boot/proc" "$boot/sys" "$boot/root" "$boot/modules"
cp "$root/usr/bin/busybox" "$boot/bin/busybox" 2>/dev/null || cp "$root/bin/busybox" "$boot/bin/busybox"
cp "$LAB_GUEST_FILES/initramfs-init" "$boot/init"
chmod 755 "$boot/init"
number=100
for module in virtio_pci virtio_blk ext4 virtio_console; do
    chroot "$root" modprobe -S "$kver" --show-depends "$module" > "$work/depends"
    while read -r kind file _; do
        name=$(basename "$file")
        if [ "$kind" = insmod ] && ! [ -e "$work/seen-$name" ]; then
            : > "$work/seen-$name"
            # Debian 13's are compressed, which not every busybox can load.
            case $name in
                *.xz) xz -dc "$root$file" > "$boot/modules/$number-${name%.xz}" ;;
                *) cp "$root$file" "$boot/modules/$number-$name" ;;
            esac
            number=$((number + 1))
        fi
    done < "$work/depends"
done

install -m 755 "$LAB_GUEST_FILES/init" "$root/usr/sbin/lab-init"
install -m 755 "$LAB_GUEST_FILES/disk-by-serial" "$root/usr/local/bin/disk-by-serial"
mkdir -p "$root/payload" "$root/mnt"
# With systemd as init (package systemd-sysv) the command server is a service, and there is no login.
if [ -h "$root/usr/sbin/init" ]; then
    units=$root/etc/systemd/system
    mkdir -p "$units/multi-user.target.wants"
    install -m 644 "$LAB_GUEST_FILES/lab.service" "$units/lab.service"
    ln -s ../lab.service "$units/multi-user.target.wants/lab.service"
    for unit in getty.target timers.target remote-fs.target; do
        ln -sf /dev/null "$units/$unit"
    done
fi
echo lab > "$root/etc/hostname"
: > "$root/etc/fstab"
rm -rf "$root"/var/cache/apt/*.bin "$root"/var/log/* "$root/usr/share/doc" "$root/usr/share/man" "$root/usr/share/locale"

mkdir "$work/out"
(cd "$boot" && find . | cpio --quiet -o -H newc > "$work/out/initramfs")
cp "$work/kernel/boot/vmlinuz-$kver" "$work/out/kernel"
echo "$kver" > "$work/out/kernel-version"

# Only the root's own files: not the package lists and the file systems mounted for the build.
tree=$work/tree
mkdir "$tree"
(cd "$root" && tar -c --one-file-system --exclude=./proc/* --exclude=./sys/* --exclude=./dev/* --exclude=./tmp/* \
    --exclude=./run/* --exclude=./var/lib/apt/lists/* --exclude=./var/cache/apt/archives/* .) | tar -x -C "$tree"
# What kept daemons from starting during the build.
rm -f "$tree/usr/sbin/policy-rc.d"
if [ -e "$tree/usr/sbin/start-stop-daemon.REAL" ]; then
    mv "$tree/usr/sbin/start-stop-daemon.REAL" "$tree/usr/sbin/start-stop-daemon"
fi
size_mib=$(($(du -sm "$tree" | cut -f 1) * 5 / 4 + 192))
mke2fs -q -t ext4 -L lab-root -O ^has_journal -E lazy_itable_init=0 -m 0 -d "$tree" "$work/out/root.img" "${size_mib}M"

mkdir "$root/lab-out"
cp --sparse=always "$work"/out/* "$root/lab-out/"
